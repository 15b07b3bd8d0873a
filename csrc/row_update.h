// Sizes and checks of one row update (SGD, Adagrad, ...), for every backend.
#pragma once

#include <bit>
#include <vector>

#include "row_tensors.h"

namespace dlrm {

using TableSizes = std::optional<std::vector<int64_t>>;

struct RowUpdateInputs : RowTensors {
  int64_t count;  // of (row, gradient) pairs
  Tensor rows;    // [count] int64, contiguous
  Tensor grad;    // [count, dim], contiguous
  // If given, the tables' rows are consecutive in the weight, and pair i belongs to table i %
  // tables: the rows are [batch, tables] flattened.
  std::vector<int64_t> table_sizes;

  RowUpdateInputs(const char* name, const Tensor& weight, const std::optional<Tensor>& low,
                  const Tensor& rows_, const Tensor& grad_, const TableSizes& table_sizes_)
      : RowTensors(name, weight, low), rows(checked_rows(rows_)) {
    count = rows.size(0);
    DLRM_CHECK(grad_.dim() == 2 && grad_.size(0) == count && grad_.size(1) == dim &&
                   is_floating(grad_.scalar_type()) && grad_.device() == weight.device(),
               name, ": expected grad [", count, ", ", dim,
               "] of Float, BFloat16 or Half on the weight's device, got ", shape_of(grad_), " ",
               dtype_of(grad_));
    grad = as_contiguous(grad_);
    DLRM_CHECK(std::bit_width(static_cast<uint64_t>(total_rows)) +
                       std::bit_width(static_cast<uint64_t>(count)) <=
                   64,
               name, ": ", count, " gradients of ", total_rows,
               " rows are more than 64 bits can number");
    if (table_sizes_) {
      table_sizes = *table_sizes_;
      check_tables();
    }
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
