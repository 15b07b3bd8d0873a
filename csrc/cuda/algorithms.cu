#include "runtime.h"

#ifdef DLRM_EMULATE_CUDA
#include <algorithm>
#include <numeric>
#include <vector>
#else
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#endif

namespace dlrm {
namespace {

#ifdef DLRM_EMULATE_CUDA

template <typename key_t>
void sort(const Launcher&, const key_t* keys, key_t* sorted_keys, const int32_t* values,
          int32_t* sorted_values, int count, int bits, const Tensor&) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](int i) { return keys[i] & (~key_t{0} >> (8 * sizeof(key_t) - bits)); };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return key(a) < key(b); });
  for (int i = 0; i < count; ++i) {
    sorted_keys[i] = keys[order[i]];
    sorted_values[i] = values[order[i]];
  }
}

void sum(const Launcher&, const int64_t* values, int64_t* sums, int64_t count, const Tensor&) {
  std::partial_sum(values, values + count, sums);
}

#else

// CUB's functions say how much scratch they want, and then take it: f(scratch, bytes) both times.
template <typename Function>
void with_scratch(const Launcher& launch, const Tensor& at, const Function& f) {
  size_t bytes = 0;
  check_cuda(launch.name(), f(nullptr, bytes));
  const auto size = static_cast<int64_t>(bytes == 0 ? 1 : bytes);
  Tensor scratch = torch::stable::new_empty(at, {size}, ScalarType::Byte);
  check_cuda(launch.name(), f(scratch.mutable_data_ptr<uint8_t>(), bytes));
}

template <typename key_t>
void sort(const Launcher& launch, const key_t* keys, key_t* sorted_keys, const int32_t* values,
          int32_t* sorted_values, int count, int bits, const Tensor& at) {
  with_scratch(launch, at, [&](void* scratch, size_t& bytes) {
    return cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, sorted_keys, values, sorted_values,
                                           count, 0, bits, launch.stream());
  });
}

void sum(const Launcher& launch, const int64_t* values, int64_t* sums, int64_t count,
         const Tensor& at) {
  with_scratch(launch, at, [&](void* scratch, size_t& bytes) {
    return cub::DeviceScan::InclusiveSum(scratch, bytes, values, sums, count, launch.stream());
  });
}

#endif

}  // namespace

SortedPairs sort_pairs(const Launcher& launch, const Tensor& keys, const Tensor& values, int bits) {
  SortedPairs sorted{torch::stable::new_empty(keys, {keys.numel()}),
                     torch::stable::new_empty(values, {keys.numel()})};
  const auto count = static_cast<int>(keys.numel());
  if (count == 0) return sorted;
  const auto sort_by = [&]<typename key_t>() {
    sort(launch, static_cast<const key_t*>(keys.const_data_ptr()),
         static_cast<key_t*>(sorted.keys.mutable_data_ptr()), values.const_data_ptr<int32_t>(),
         sorted.values.mutable_data_ptr<int32_t>(), count, bits, keys);
  };
  if (keys.scalar_type() == ScalarType::Int) {
    sort_by.template operator()<uint32_t>();
  } else {
    sort_by.template operator()<uint64_t>();
  }
  return sorted;
}

Tensor inclusive_sums(const Launcher& launch, const Tensor& values) {
  Tensor sums = torch::stable::new_empty(values, {values.numel()});
  if (values.numel() > 0) {
    sum(launch, values.const_data_ptr<int64_t>(), sums.mutable_data_ptr<int64_t>(), values.numel(),
        values);
  }
  return sums;
}

}  // namespace dlrm
