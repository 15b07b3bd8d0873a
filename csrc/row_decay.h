// Sizes and checks of the L2 term of the steps that did not touch a row.
//
// An optimizer counts the steps since all rows of a weight were last up to date. `steps` has the
// parameters of each step, `done` the number of steps that each row has had. All rows, or those of
// a batch, possibly repeated, get the remaining steps.
#pragma once

#include "row_tensors.h"

namespace dlrm {

struct RowDecayInputs : RowTensors {
  int64_t num_steps;
  int64_t count;               // of rows that are asked for
  std::optional<Tensor> rows;  // [count] int64, contiguous; all rows where there is none
  Tensor steps;                // [num_steps, columns] on the CPU, contiguous

  RowDecayInputs(const char* name, const Tensor& weight, const std::optional<Tensor>& low,
                 const Tensor& done, const Tensor& steps_, ScalarType dtype, int64_t columns,
                 const std::optional<Tensor>& rows_)
      : RowTensors(name, weight, low), steps(as_contiguous(steps_)) {
    check("done", done, ScalarType::Int, 0);
    DLRM_CHECK(steps.dim() == 2 && steps.size(1) == columns && steps.scalar_type() == dtype &&
                   steps.is_cpu(),
               name, ": expected steps [steps, ", columns, "] of ",
               torch::headeronly::toString(dtype), " on the CPU, got ", shape_of(steps), " ",
               dtype_of(steps));
    num_steps = steps.size(0);
    DLRM_CHECK(num_steps <= INT32_MAX, name, ": ", num_steps,
               " steps are more than 32 bits can count");
    if (rows_) rows = checked_rows(*rows_);
    count = rows ? rows->size(0) : total_rows;
  }
};

}  // namespace dlrm
