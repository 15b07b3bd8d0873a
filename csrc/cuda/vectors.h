// Several elements at once: loads and stores of up to 16 bytes, and ids of any width.
#pragma once

#include <cstring>

#include "runtime.h"

namespace dlrm {

template <int bytes>
struct WordOf;
template <>
struct WordOf<2> {
  using type = unsigned short;
};
template <>
struct WordOf<4> {
  using type = unsigned;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<16> {
  using type = uint4;
};

// `kCount` elements in registers. Memory that they come from or go to is aligned to the smaller of
// their size and 16 bytes.
template <typename scalar_t, int kCount>
struct Elements {
  static constexpr int kBytes = kCount * static_cast<int>(sizeof(scalar_t));
  using Word = typename WordOf<(kBytes < 16 ? kBytes : 16)>::type;
  static constexpr int kWords = kBytes / static_cast<int>(sizeof(Word));

  Word words[kWords];

  __device__ void load(const scalar_t* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const Word*>(from)[i];
  }
  __device__ void store(scalar_t* to) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<Word*>(to)[i] = words[i];
  }
  __device__ void clear() { memset(words, 0, sizeof words); }
  __device__ void get(float* values) const {
    scalar_t parts[kCount];
    memcpy(parts, words, sizeof parts);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = static_cast<float>(parts[i]);
  }
  __device__ void set(const float* values) {
    scalar_t parts[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) parts[i] = static_cast<scalar_t>(values[i]);
    memcpy(words, parts, sizeof parts);
  }
};

// Adds kVector elements to as many sums.
template <int kVector, typename grad_t>
__device__ void add_to(float* sum, const grad_t* from) {
  Elements<grad_t, kVector> elements;
  float values[kVector];
  elements.load(from);
  elements.get(values);
#pragma unroll
  for (int k = 0; k < kVector; ++k) sum[k] += values[k];
}

template <typename scalar_t>
constexpr int kElementsOf16Bytes = 16 / static_cast<int>(sizeof(scalar_t));

inline bool is_aligned(const void* pointer, int64_t bytes = 16) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Calls f<kVector>() with the elements of 16 bytes if rows of `size` elements at these places are
// aligned to them, else with 1.
template <typename scalar_t, typename Function>
void dispatch_vector(int64_t size, std::initializer_list<const void*> places, const Function& f) {
  constexpr int kVector = kElementsOf16Bytes<scalar_t>;
  bool aligned = size % kVector == 0;
  for (const void* place : places) aligned = aligned && is_aligned(place);
  aligned ? f.template operator()<kVector>() : f.template operator()<1>();
}

// Integers of 1, 2, 4 or 8 bytes. The width is checked at every load, so that kernels need not be
// compiled four times.
struct Integers {
  const void* data;
  int bytes;

  explicit Integers(const Tensor& tensor)
      : data(tensor.const_data_ptr()), bytes(static_cast<int>(tensor.element_size())) {}

  __device__ int64_t operator[](int64_t i) const {
    switch (bytes) {
      case 1:
        return static_cast<const int8_t*>(data)[i];
      case 2:
        return static_cast<const int16_t*>(data)[i];
      case 4:
        return static_cast<const int32_t*>(data)[i];
      default:
        return static_cast<const int64_t*>(data)[i];
    }
  }
};

// A block whose threads stand in groups, each of which goes along a row of `vectors` vectors.
struct Groups {
  dim3 threads;  // x: of a group, a power of 2 up to a warp; y: groups

  Groups(int64_t vectors, unsigned threads_of_block) {
    unsigned width = 1;
    while (width < kWarp && width < vectors) width *= 2;
    threads = dim3(width, threads_of_block / width);
  }
};

}  // namespace dlrm
