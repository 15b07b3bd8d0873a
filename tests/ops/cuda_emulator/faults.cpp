// Kernels with a fault, each of which the emulator must find; 0 has none.
#include <stdexcept>

#include "cuda_emulator.h"

namespace faults {

constexpr unsigned kThreads = 64;

// Copies numbers to shared memory, four at once.
void copy(int which, int* values) {
  alignas(16) static int numbers[kThreads + 4];
  const unsigned thread = threadIdx.x;
  numbers[thread] = static_cast<int>(thread);
  __syncthreads();
  if (thread % 4 == 0) __pipeline_memcpy_async(values + thread, numbers + thread, 16);
  __pipeline_commit();
  if (which == 7 && thread == 8) __pipeline_memcpy_async(values + 8, numbers + 9, 16);
  if (which != 6) __pipeline_wait_prior(0);  // without it, they are not there
}

void kernel(int which, int* sum) {
  auto* values = reinterpret_cast<int*>(emulator::shared_memory());
  const unsigned thread = threadIdx.x;
  if (which == 1 && thread == 40) return;  // and misses the barrier
  copy(which, values);
  if (which != 2) __syncthreads();  // without it, some read what is not there yet
  int value = values[kThreads - 1 - thread];
  if (which == 3 && thread == 3) return;  // and misses the exchange
  for (int bit = 16; bit > 0; bit /= 2) value += __shfl_xor_sync(0xffffffffu, value, bit);
  if (which == 4 && thread == 0) values[kThreads] = 1;  // behind the end
  if (which == 5 && thread == 0) values[-1] = 1;
  if (thread % 32 == 0) atomicAdd(sum, value);
}

}  // namespace faults

// Returns the sum of all threads' numbers, or writes to `message` what was wrong and returns -1.
extern "C" __attribute__((visibility("default"))) int emulate_fault(int which, char* message,
                                                                    int64_t size) {
  int sum = 0;
  try {
    emulator::run(dim3(1), dim3(faults::kThreads), faults::kThreads * sizeof(int),
                  [&] { faults::kernel(which, &sum); });
  } catch (const std::runtime_error& error) {
    std::strncpy(message, error.what(), size - 1);
    return -1;
  }
  return sum;
}
