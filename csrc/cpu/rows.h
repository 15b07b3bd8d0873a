// Where a weight and its states are, and the numbers of a step. Values are float32, or two halves
// of float32 values.
#pragma once

#include <optional>

#include "../row_update.h"

namespace dlrm {

// Points to float32 values kept as two halves: the value rounded to bfloat16, and what its bits are
// more than those, a signed number (see dlrm/ops/split_float32.py).
struct SplitFloats {
  BFloat16* high;
  int16_t* low;

  SplitFloats operator+(int64_t count) const { return {high + count, low + count}; }
};

// Rows of a weight (float* or SplitFloats) and their states.
template <typename Weight>
struct Rows {
  Weight weight;
  float* states[kMostStates];
};

// Calls f with the rows of a weight and its states.
template <typename Function>
void dispatch_rows(const Tensor& weight, const std::optional<Tensor>& low,
                   const std::vector<Tensor>& states, const Function& f) {
  float* data[kMostStates] = {};
  for (size_t i = 0; i < states.size(); ++i) data[i] = states[i].mutable_data_ptr<float>();
  if (low) {
    f(Rows<SplitFloats>{{weight.mutable_data_ptr<BFloat16>(), low->mutable_data_ptr<int16_t>()},
                        {data[0], data[1]}});
  } else {
    f(Rows<float*>{weight.mutable_data_ptr<float>(), {data[0], data[1]}});
  }
}

// A number that an operator takes as a tensor of one value.
inline double scalar(const char* name, const char* what, const Tensor& tensor) {
  DLRM_CHECK(tensor.numel() == 1 && tensor.is_cpu(), name, ": expected ", what,
             " to be one value on the CPU, got ", shape_of(tensor));
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return *tensor.const_data_ptr<float>();
    case ScalarType::Double:
      return *tensor.const_data_ptr<double>();
    case ScalarType::Long:
      return static_cast<double>(*tensor.const_data_ptr<int64_t>());
    case ScalarType::Bool:
      return *tensor.const_data_ptr<bool>();
    default:
      fail(name, ": expected ", what, " to be Float, Double, Long or Bool, got ", dtype_of(tensor));
      return 0;
  }
}

}  // namespace dlrm
