// Sorting and prefix sums, which are CUB's.
#pragma once

#include "runtime.h"

namespace dlrm {

struct SortedPairs {
  Tensor keys;
  Tensor values;
};

// Sorts pairs of an Int or Long key, taken as unsigned and below 2^bits, and an Int value by their
// keys; pairs of one key stay in their order.
SortedPairs sort_pairs(const Launcher& launch, const Tensor& keys, const Tensor& values, int bits);

// The sums of all Long values up to and with each one.
Tensor inclusive_sums(const Launcher& launch, const Tensor& values);

}  // namespace dlrm
