#include <torch/csrc/stable/library.h>

#include <atomic>

#include "errors.h"
#include "runtime.h"

namespace dlrm {

#ifdef DLRM_EMULATE_CUDA

Launcher::Launcher(const char* name, const Tensor&)
    : name_(name), device_{emulator::capability(), emulator::most_shared(), 0} {}

#else

#ifndef DLRM_CUDA_ARCHS
#define DLRM_CUDA_ARCHS "unknown"
#endif

namespace {

int attribute(const char* name, cudaDeviceAttr which, int index) {
  int value = 0;
  check_cuda(name, cudaDeviceGetAttribute(&value, which, index));
  return value;
}

Device device_of(const char* name, int index) {
  thread_local int asked = -1;
  thread_local Device device{};
  if (asked != index) {
    const int major = attribute(name, cudaDevAttrComputeCapabilityMajor, index);
    const int minor = attribute(name, cudaDevAttrComputeCapabilityMinor, index);
    device = {10 * major + minor, attribute(name, cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
              index};
    asked = index;
  }
  return device;
}

cudaStream_t current_stream(int index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream));
  return static_cast<cudaStream_t>(stream);
}

std::string this_gpu() {
  int index = 0, major = 0, minor = 0;
  cudaGetDevice(&index);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
  return std::to_string(10 * major + minor);
}

}  // namespace

void check_cuda(const char* name, cudaError_t error) {
  if (error == cudaSuccess) [[likely]]
    return;
  cudaGetLastError();  // forgotten, where it can be: the next launch is not to blame
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion ||
      error == cudaErrorInvalidDeviceFunction) {
    const std::string arch = this_gpu();
    fail(name, ": dlrm/_ops_cuda.so is compiled for the architectures " DLRM_CUDA_ARCHS,
         ", and this GPU's is ", arch, ": rebuild dlrm with DLRM_CUDA_ARCHS=", arch,
         " in the environment (", cudaGetErrorString(error), ")");
  }
  if (error == cudaErrorInsufficientDriver) {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    fail(name, ": dlrm/_ops_cuda.so needs a driver for CUDA ", CUDART_VERSION / 1000, ".",
         CUDART_VERSION % 1000 / 10, ", and this one is for CUDA ", driver / 1000, ".",
         driver % 1000 / 10, ": update it, or rebuild dlrm with an older nvcc (DLRM_CUDA=0 builds",
         " without CUDA kernels)");
  }
  fail(name, ": CUDA error: ", cudaGetErrorString(error));
}

Launcher::Launcher(const char* name, const Tensor& at)
    : name_(name),
      device_(device_of(name, at.get_device_index())),
      guard_(at.get_device_index()),
      stream_(current_stream(at.get_device_index())) {}

#endif

namespace {

__device__ ErrorWord error_word;

// The address of the current device's word, which is the launch's.
ErrorWord* address_of_word(const Launcher& launch) {
#ifdef DLRM_EMULATE_CUDA
  return &error_word;
#else
  thread_local int asked = -1;
  thread_local void* address = nullptr;
  if (asked != launch.device().index) {
    check_cuda(launch.name(), cudaGetSymbolAddress(&address, error_word));
    asked = launch.device().index;
  }
  return static_cast<ErrorWord*>(address);
#endif
}

unsigned long long next_launch() {
#ifdef DLRM_EMULATE_CUDA
  return emulator::next_launch();
#else
  static std::atomic<unsigned long long> count{0};
  return ++count;
#endif
}

constexpr int kTaken = 8;

// One thread: writes the op and its report to `taken`, op -1 for none, and empties the word.
__global__ void take_error(ErrorWord* word, int64_t* taken) {
  const Report& report = word->report;
  const int64_t values[] = {word->launch == 0 ? -1 : word->op,
                            report.problem,
                            report.position,
                            report.table,
                            report.batch_row,
                            report.value,
                            report.limit,
                            report.first};
  for (int i = 0; i < kTaken; ++i) taken[i] = values[i];
  word->launch = 0;
}

Tensor take_cuda_error(const Tensor& at) {
  const Launcher launch("take_cuda_error", at);
  Tensor taken = torch::stable::new_empty(at, {kTaken}, ScalarType::Long);
  launch(take_error, 1, 1, 0, address_of_word(launch), taken.mutable_data_ptr<int64_t>());
  return taken;
}

// Returns the switches; `value` >= 0 sets them.
int64_t cuda_switches(int64_t value) {
  if (value >= 0) switches = value;
  return switches;
}

}  // namespace

Errors::Errors(const Launcher& launcher, ReportingOp reporting)
    : word(address_of_word(launcher)), launch(next_launch()), op(reporting) {}

}  // namespace dlrm

DLRM_CUDA_IMPL(m) { m.impl("take_cuda_error", TORCH_BOX(&dlrm::take_cuda_error)); }

#ifdef DLRM_EMULATE_CUDA
STABLE_TORCH_LIBRARY_IMPL(dlrm_emulated, CompositeExplicitAutograd, m) {
#else
STABLE_TORCH_LIBRARY_IMPL(dlrm, CompositeExplicitAutograd, m) {
#endif
  m.impl("cuda_switches", TORCH_BOX(&dlrm::cuda_switches));
}
