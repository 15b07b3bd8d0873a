// Shared by the kernels of every instruction set, and included outside their regions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../tensors.h"

#define DLRM_ALWAYS_INLINE __attribute__((always_inline))  // after a lambda's parameters
#define DLRM_INLINE static inline DLRM_ALWAYS_INLINE

namespace dlrm {

// A bf16 pair, taken as one 32-bit lane.
enum BFloat16Pair : uint32_t {};

// Zeroed memory for one task: whole cache lines, and so whole vectors.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t size) {
    const size_t bytes = (std::max<int64_t>(size, 1) * sizeof(T) + 63) / 64 * 64;
    data_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
    if (!data_) throw std::bad_alloc();
    std::memset(data_.get(), 0, bytes);
  }
  T* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  std::unique_ptr<T, Free> data_;
};

// Outputs larger than this are written around the caches: the next reader finds them in memory
// either way, and the lines need not be read before they are written.
constexpr int64_t kStreamBytes = 32 << 20;

// Whether rows may be streamed: whole vectors at aligned addresses, and too much for the caches.
template <typename scalar_t>
bool streams(const scalar_t* output, int64_t rows, int64_t dim) {
  const int64_t row_bytes = dim * sizeof(scalar_t);
  return rows * row_bytes >= kStreamBytes && row_bytes % 64 == 0 &&
         reinterpret_cast<uintptr_t>(output) % 64 == 0;
}

}  // namespace dlrm
