// Sizes and checks of one row update (SGD, Adagrad, ...), for every backend.
#pragma once

#include <bit>
#include <optional>
#include <vector>

#include "tensors.h"

namespace dlrm {

using TableSizes = std::optional<std::vector<int64_t>>;

struct RowUpdateInputs {
  const char* name;
  int64_t total_rows;
  int64_t dim;
  int64_t count;  // of (row, gradient) pairs
  Tensor rows;    // [count] int64, contiguous
  Tensor grad;    // [count, dim], contiguous
  // If given, the tables' rows are consecutive in the weight, and pair i belongs to table i %
  // tables: the rows are [batch, tables] flattened.
  std::vector<int64_t> table_sizes;

  // `low` has the lower halves of the weight's values if the weight is BFloat16.
  RowUpdateInputs(const char* name_, const Tensor& weight, const std::optional<Tensor>& low,
                  const Tensor& rows_, const Tensor& grad_, const TableSizes& table_sizes_)
      : name(name_) {
    DLRM_CHECK(
        weight.dim() == 2 && weight.size(1) > 0 &&
            (weight.scalar_type() == ScalarType::Float ||
             (weight.scalar_type() == ScalarType::BFloat16 && low)) &&
            weight.is_contiguous(),
        name,
        ": expected a contiguous Float weight [rows, dim > 0], or a BFloat16 one with low, got ",
        shape_of(weight), " ", dtype_of(weight), low ? "" : " without low");
    if (low) {
      DLRM_CHECK(
          weight.scalar_type() == ScalarType::BFloat16, name,
          ": expected no low beside a Float weight: it is the lower half of a BFloat16 one's");
      DLRM_CHECK(low->dim() == 2 && low->size(0) == weight.size(0) &&
                     low->size(1) == weight.size(1) && low->scalar_type() == ScalarType::Short &&
                     low->is_contiguous() && low->device() == weight.device(),
                 name, ": expected contiguous Short low ", shape_of(weight),
                 " on the weight's device, got ", shape_of(*low), " ", dtype_of(*low));
    }
    DLRM_CHECK(rows_.dim() == 1 && rows_.scalar_type() == ScalarType::Long, name,
               ": expected rows [count] Long, got ", shape_of(rows_), " ", dtype_of(rows_));
    DLRM_CHECK(grad_.dim() == 2 && grad_.size(0) == rows_.size(0) &&
                   grad_.size(1) == weight.size(1) && is_floating(grad_.scalar_type()),
               name, ": expected grad [", rows_.size(0), ", ", weight.size(1),
               "] of Float, BFloat16 or Half, got ", shape_of(grad_), " ", dtype_of(grad_));
    DLRM_CHECK(weight.device() == rows_.device() && weight.device() == grad_.device(), name,
               ": weight, rows and grad are not all on one device");
    total_rows = weight.size(0);
    dim = weight.size(1);
    count = rows_.size(0);
    DLRM_CHECK(std::bit_width(static_cast<uint64_t>(total_rows)) +
                       std::bit_width(static_cast<uint64_t>(count)) <=
                   64,
               name, ": ", count, " gradients of ", total_rows,
               " rows are more than 64 bits can number");
    rows = as_contiguous(rows_);
    grad = as_contiguous(grad_);
    if (table_sizes_) {
      table_sizes = *table_sizes_;
      check_tables();
    }
  }

  // Optimizer state with `columns` values per row: [rows, columns], or [rows] if `columns` is 0.
  void check_state(const char* state_name, const Tensor& state, const Tensor& weight,
                   int64_t columns) const {
    const bool shape_fits =
        columns == 0 ? state.dim() == 1 : state.dim() == 2 && state.size(1) == columns;
    DLRM_CHECK(shape_fits && state.size(0) == total_rows &&
                   state.scalar_type() == ScalarType::Float && state.is_contiguous() &&
                   state.device() == weight.device(),
               name, ": expected contiguous Float ", state_name, " of ", total_rows, " rows",
               columns == 0 ? "" : " shaped as the weight", " on its device, got ", shape_of(state),
               " ", dtype_of(state));
  }

 private:
  void check_tables() const {
    int64_t left = total_rows;
    bool fit = true;
    std::ostringstream shown;
    for (int64_t size : table_sizes) {
      fit = fit && size >= 0 && size <= left;
      left -= fit ? size : 0;
      shown << (shown.tellp() > 0 ? ", " : "") << size;
    }
    DLRM_CHECK(fit && left == 0, name, ": expected table_sizes >= 0 that add up to the weight's ",
               total_rows, " rows, got [", shown.str(), "]");
    const auto tables = static_cast<int64_t>(table_sizes.size());
    DLRM_CHECK(tables == 0 ? count == 0 : count % tables == 0, name,
               ": expected as many rows of each of the ", tables, " tables of table_sizes, got ",
               count, " rows");
  }
};

}  // namespace dlrm
