// Checks of a weight of table rows and of the tensors beside it, for row updates and row decays.
#pragma once

#include <optional>

#include "tensors.h"

namespace dlrm {

struct RowTensors {
  const char* name;  // of the operator
  Tensor weight;     // [total_rows, dim], contiguous
  int64_t total_rows;
  int64_t dim;

  // `low` has the lower halves of the weight's values if the weight is BFloat16.
  RowTensors(const char* name_, const Tensor& weight_, const std::optional<Tensor>& low)
      : name(name_), weight(weight_) {
    DLRM_CHECK(
        weight.dim() == 2 && weight.size(1) > 0 &&
            weight.scalar_type() == (low ? ScalarType::BFloat16 : ScalarType::Float) &&
            weight.is_contiguous(),
        name,
        ": expected a contiguous Float weight [rows, dim > 0], or a BFloat16 one with low, got ",
        shape_of(weight), " ", dtype_of(weight), low ? " with low" : " without low");
    total_rows = weight.size(0);
    dim = weight.size(1);
    if (low) check("low", *low, ScalarType::Short, dim);
  }

  // Optimizer state with `columns` values for each row; see `check`.
  void check_state(const char* what, const Tensor& state, int64_t columns) const {
    check(what, state, ScalarType::Float, columns);
  }

  // A tensor with `columns` values for each row: [rows, columns], or [rows] if `columns` is 0.
  void check(const char* what, const Tensor& tensor, ScalarType dtype, int64_t columns) const {
    const bool fits =
        columns == 0 ? tensor.dim() == 1 : tensor.dim() == 2 && tensor.size(1) == columns;
    DLRM_CHECK(fits && tensor.size(0) == total_rows && tensor.scalar_type() == dtype &&
                   tensor.is_contiguous() && tensor.device() == weight.device(),
               name, ": expected contiguous ", torch::headeronly::toString(dtype), " ", what, " [",
               total_rows, columns == 0 ? "" : ", " + std::to_string(columns),
               "] on the weight's device, got ", shape_of(tensor), " ", dtype_of(tensor));
  }

  // Numbers of rows, possibly repeated, in any order; returns them contiguous.
  Tensor checked_rows(const Tensor& rows) const {
    DLRM_CHECK(rows.dim() == 1 && rows.scalar_type() == ScalarType::Long &&
                   rows.device() == weight.device(),
               name, ": expected rows [count] Long on the weight's device, got ", shape_of(rows),
               " ", dtype_of(rows));
    return as_contiguous(rows);
  }
};

}  // namespace dlrm
