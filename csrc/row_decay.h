// Sizes and checks of the L2 term of the steps that did not touch a row.
//
// An optimizer counts the steps since all rows of a weight were last up to date. `steps` has the
// parameters of each step, `done` the number of steps that each row has had. All rows, or those of
// a batch, possibly repeated, get the remaining steps.
#pragma once

#include <optional>

#include "tensors.h"

namespace dlrm {

struct RowDecayInputs {
  const char* name;
  int64_t total_rows;
  int64_t dim;
  int64_t num_steps;
  int64_t count;               // of rows that are asked for
  std::optional<Tensor> rows;  // [count] int64, contiguous; all rows where there is none
  Tensor steps;                // [num_steps, columns], contiguous

  RowDecayInputs(const char* name_, const Tensor& weight, const std::optional<Tensor>& low,
                 const Tensor& done, const Tensor& steps_, ScalarType dtype, int64_t columns,
                 const std::optional<Tensor>& rows_)
      : name(name_), steps(as_contiguous(steps_)) {
    DLRM_CHECK(
        weight.dim() == 2 && weight.size(1) > 0 &&
            weight.scalar_type() == (low ? ScalarType::BFloat16 : ScalarType::Float) &&
            weight.is_contiguous(),
        name,
        ": expected a contiguous Float weight [rows, dim > 0], or a BFloat16 one with low, got ",
        shape_of(weight), " ", dtype_of(weight), low ? " with low" : " without low");
    total_rows = weight.size(0);
    dim = weight.size(1);
    if (low) check_rows("Short low", *low, ScalarType::Short, dim);
    check_rows("Int done", done, ScalarType::Int, 0);
    DLRM_CHECK(steps.dim() == 2 && steps.size(1) == columns && steps.scalar_type() == dtype &&
                   steps.is_cpu(),
               name, ": expected steps [steps, ", columns, "] of ",
               torch::headeronly::toString(dtype), " on the CPU, got ", shape_of(steps), " ",
               dtype_of(steps));
    num_steps = steps.size(0);
    DLRM_CHECK(num_steps <= INT32_MAX, name, ": ", num_steps,
               " steps are more than 32 bits can count");
    count = total_rows;
    if (!rows_) return;
    DLRM_CHECK(rows_->dim() == 1 && rows_->scalar_type() == ScalarType::Long && rows_->is_cpu(),
               name, ": expected rows [count] Long, got ", shape_of(*rows_), " ", dtype_of(*rows_));
    rows = as_contiguous(*rows_);
    count = rows->size(0);
  }

  // A tensor with `columns` values for each row: [rows, columns], or [rows] if `columns` is 0.
  void check_rows(const char* what, const Tensor& tensor, ScalarType dtype, int64_t columns) const {
    const bool fits =
        columns == 0 ? tensor.dim() == 1 : tensor.dim() == 2 && tensor.size(1) == columns;
    DLRM_CHECK(fits && tensor.size(0) == total_rows && tensor.scalar_type() == dtype &&
                   tensor.is_contiguous() && tensor.is_cpu(),
               name, ": expected contiguous ", what, " of ", total_rows, " rows",
               columns == 0 ? "" : " shaped as the weight", ", got ", shape_of(tensor), " ",
               dtype_of(tensor));
  }
};

}  // namespace dlrm
