// Storage of a weight's values: float32, or two halves of float32 values.
#pragma once

#include <optional>

#include "../tensors.h"

namespace dlrm {

// Points to float32 values kept as two halves: the value rounded to bfloat16, and what its bits are
// more than those, a signed number (see dlrm/ops/split_float32.py).
struct SplitFloats {
  BFloat16* high;
  int16_t* low;

  SplitFloats operator+(int64_t count) const { return {high + count, low + count}; }
};

// Calls f with a pointer to the weight of the type that rules take.
template <typename Function>
void dispatch_weight(const Tensor& weight, const std::optional<Tensor>& low, const Function& f) {
  if (low) {
    f(SplitFloats{weight.mutable_data_ptr<BFloat16>(), low->mutable_data_ptr<int16_t>()});
  } else {
    f(weight.mutable_data_ptr<float>());
  }
}

}  // namespace dlrm
