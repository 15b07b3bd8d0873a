// What the kernels of csrc/cuda use of CUDA, for a C++ compiler and a CPU.
//
// Blocks run one after the other, the threads of a block as fibers that change places at barriers
// and collectives alone. What is found wrong ends the launch with an exception: a thread that is
// missing at a barrier, a write outside the shared memory. Fresh shared memory is full of NaNs. A
// vector that is read or written where it is not aligned ends the process.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

// As CUDA has them without std.
using std::max;
using std::min;

namespace emulator {

// Of the thread that runs.
extern dim3 thread_index, block_index, block_size, grid_size;

// What accesses are counted of is `kernel`.
void run(dim3 grid, dim3 block, int64_t shared_bytes, const std::function<void()>& thread,
         const void* kernel = nullptr);

unsigned char* shared_memory();
int capability();
int64_t most_shared();
// They are counted anew when the emulator is configured, as a graph that is replayed has them.
unsigned long long next_launch();

void wait_for_block();
// Waits for the threads of `mask` in this warp.
void wait_for_warp(unsigned mask);
unsigned lane();
// Where the lanes of this warp lay down what they exchange.
uint64_t* exchange();

// Copies that are done when they are waited for: those of the latest group, and older groups.
void copy_later(void* to, const void* from, int64_t bytes);
void end_group_of_copies();
void copy_all_but(unsigned groups);

// Of an atomic addition: the sectors of memory that the lanes of a warp reach by the same one.
void count_sectors(const void* address, int64_t bytes);

template <typename T>
T shuffle(unsigned mask, T value, unsigned from) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  std::memcpy(exchange() + lane(), &value, sizeof value);
  wait_for_warp(mask);
  std::memcpy(&value, exchange() + from % 32, sizeof value);
  wait_for_warp(mask);
  return value;
}

}  // namespace emulator

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size

inline void __syncthreads() { emulator::wait_for_block(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulator::wait_for_warp(mask); }
inline void __threadfence() {}
inline unsigned __activemask() { return 1u << emulator::lane(); }  // any lanes may have diverged
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }

inline void __pipeline_memcpy_async(void* to, const void* from, int64_t bytes) {
  emulator::copy_later(to, from, bytes);
}
inline void __pipeline_commit() { emulator::end_group_of_copies(); }
inline void __pipeline_wait_prior(unsigned groups) { emulator::copy_all_but(groups); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int from) {
  return emulator::shuffle(mask, value, from);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return emulator::shuffle(mask, value, emulator::lane() ^ bits);
}

// Counted apart from what kernels read and write.
#define DLRM_NOT_COUNTED __attribute__((no_sanitize("thread")))
template <typename T>
DLRM_NOT_COUNTED T atomicAdd(T* address, T value) {
  emulator::count_sectors(address, sizeof value);
  const T old = *address;
  *address = old + value;
  return old;
}
DLRM_NOT_COUNTED inline float4 atomicAdd(float4* address, float4 value) {
  emulator::count_sectors(address, sizeof value);
  const float4 old = *address;
  *address = {old.x + value.x, old.y + value.y, old.z + value.z, old.w + value.w};
  return old;
}
template <typename T>
DLRM_NOT_COUNTED T atomicCAS(T* address, T expected, T value) {
  const T old = *address;
  if (old == expected) *address = value;
  return old;
}
template <typename T>
DLRM_NOT_COUNTED T atomicExch(T* address, T value) {
  const T old = *address;
  *address = value;
  return old;
}

inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline int __float_as_int(float value) {
  int bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Tiles for the tensor cores: lane 0 of a warp holds the whole one.
namespace nvcuda::wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };
namespace precision {
struct tf32 {};
}  // namespace precision

template <typename T>
struct StoredAs {
  using type = T;
};
template <>
struct StoredAs<precision::tf32> {
  using type = float;
};

template <typename Use, int m, int n, int k, typename T, typename Layout = void>
struct fragment {
  static constexpr int kRows = std::is_same_v<Use, matrix_b> ? k : m;
  static constexpr int kColumns = std::is_same_v<Use, matrix_a> ? k : n;
  static constexpr bool kRowMajor = std::is_same_v<Layout, row_major>;
  typename StoredAs<T>::type values[kRows][kColumns];
};

inline bool first_of_warp() {
  emulator::wait_for_warp(0xffffffffu);
  return emulator::lane() == 0;
}

template <typename Fragment, typename T>
void fill_fragment(Fragment& tile, T value) {
  if (first_of_warp()) std::fill_n(&tile.values[0][0], tile.kRows * tile.kColumns, value);
}
template <typename Fragment, typename T>
void load_matrix_sync(Fragment& tile, const T* from, unsigned stride) {
  if (!first_of_warp()) return;
  for (unsigned i = 0; i < tile.kRows; ++i) {
    for (unsigned j = 0; j < tile.kColumns; ++j) {
      const T value = from[tile.kRowMajor ? i * stride + j : j * stride + i];
      std::memcpy(&tile.values[i][j], &value, sizeof value);
    }
  }
}
template <typename A, typename B, typename C>
void mma_sync(C& to, const A& a, const B& b, const C& c) {
  if (!first_of_warp()) return;
  for (int i = 0; i < to.kRows; ++i) {
    float sums[C::kColumns];
    for (int j = 0; j < to.kColumns; ++j) sums[j] = c.values[i][j];
    for (int k = 0; k < a.kColumns; ++k) {
      const float factor = static_cast<float>(a.values[i][k]);
      for (int j = 0; j < to.kColumns; ++j) sums[j] += factor * static_cast<float>(b.values[k][j]);
    }
    for (int j = 0; j < to.kColumns; ++j) to.values[i][j] = sums[j];
  }
}
template <typename Fragment, typename T>
void store_matrix_sync(T* to, const Fragment& tile, unsigned stride, layout_t) {
  if (!first_of_warp()) return;
  for (unsigned i = 0; i < tile.kRows; ++i) {
    for (unsigned j = 0; j < tile.kColumns; ++j) to[i * stride + j] = tile.values[i][j];
  }
}

}  // namespace nvcuda::wmma
