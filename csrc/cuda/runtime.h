// The one place where kernels are launched, and where CUDA and its emulator (tests/ops) differ.
//
// With DLRM_EMULATE_CUDA the same kernels are compiled by a C++ compiler and run on CPU tensors.
#pragma once

#include <atomic>
#include <limits>
#include <type_traits>
#include <utility>

#include "../tensors.h"

#ifdef DLRM_EMULATE_CUDA
#include "cuda_emulator.h"
#define DLRM_CUDA_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(dlrm_emulated, CPU, m)
#else
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#define DLRM_CUDA_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(dlrm, CUDA, m)
#endif

namespace dlrm {

// The process's switches; see cuda_switches in dlrm/ops/library.py.
enum Switch : int64_t { kAllowTf32 = 1, kDeterministic = 2 };
inline std::atomic<int64_t> switches{0};
inline bool is_on(Switch which) { return (switches.load(std::memory_order_relaxed) & which) != 0; }

constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kWarp = 32;

template <typename Integer>
constexpr Integer ceil_div(Integer a, std::type_identity_t<Integer> b) {
  return (a + b - 1) / b;
}

#ifdef DLRM_EMULATE_CUDA

inline unsigned char* shared_memory() { return emulator::shared_memory(); }

#else

// The block's dynamic shared memory.
__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(128) unsigned char memory[];
  return memory;
}

// Throws an error for the user about a failed call of the runtime.
void check_cuda(const char* name, cudaError_t error);

#endif

// The mask of `count` lanes of a warp.
__device__ constexpr unsigned lanes(int first, int count) {
  return (kWholeWarp >> (kWarp - count)) << first;
}

// Device properties by which kernels are chosen.
struct Device {
  int capability;       // 80 is 8.0
  int64_t most_shared;  // bytes that a block may ask for
  int index;
};

// Launches the kernels of one op on the device of a tensor and on the stream that is current there;
// until it goes, that device is the current one.
class Launcher {
 public:
  Launcher(const char* name, const Tensor& at);

  const char* name() const { return name_; }
  const Device& device() const { return device_; }

#ifdef DLRM_EMULATE_CUDA
  void* stream() const { return nullptr; }
#else
  cudaStream_t stream() const { return stream_; }
#endif

  // Does nothing without blocks.
  template <typename... Parameters, typename... Arguments>
  void operator()(void (*kernel)(Parameters...), int64_t blocks, dim3 threads, int64_t shared_bytes,
                  Arguments&&... arguments) const {
    if (blocks == 0) return;
    DLRM_CHECK(blocks > 0 && blocks <= std::numeric_limits<int32_t>::max(), name_, ": ", blocks,
               " blocks of threads are more than a GPU takes at once: split the batch");
    const dim3 grid(static_cast<unsigned>(blocks));
#ifdef DLRM_EMULATE_CUDA
    const auto thread = [&] { kernel(static_cast<Parameters>(arguments)...); };
    emulator::run(grid, threads, shared_bytes, std::cref(thread),
                  reinterpret_cast<const void*>(kernel));
#else
    if (shared_bytes > 48 * 1024) {
      check_cuda(name_, cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(shared_bytes)));
    }
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = threads;
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream_;
    check_cuda(name_, cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
#endif
  }

 private:
  const char* name_;
  Device device_;
#ifndef DLRM_EMULATE_CUDA
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
#endif
};

// Sorting and prefix sums, which are CUB's.
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
