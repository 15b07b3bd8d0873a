// Counters in memory that processes share, by which they wait for each other's data. No torch:
// dlrm/distributed/shared_memory.py calls these plain C functions.
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

#define DLRM_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kLooks = 2000;  // before a thread sleeps: some 50 us

using Counter = std::atomic<uint32_t>;
static_assert(Counter::is_always_lock_free && sizeof(Counter) == sizeof(uint32_t));

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// Sets a counter after everything that this thread has written, and wakes those who wait for it.
DLRM_EXPORT void dlrm_set_counter(Counter* counter, uint32_t value) {
  counter->store(value, std::memory_order_release);
  syscall(SYS_futex, counter, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Waits until a counter has a value, for some nanoseconds at most; returns whether it has.
DLRM_EXPORT int dlrm_await_counter(Counter* counter, uint32_t value, int64_t nanoseconds) {
  for (int look = 0; look < kLooks; ++look) {
    if (counter->load(std::memory_order_acquire) == value) return 1;
    relax();
  }
  const uint32_t seen = counter->load(std::memory_order_acquire);
  if (seen != value) {
    const timespec limit{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
    syscall(SYS_futex, counter, FUTEX_WAIT, seen, &limit, nullptr, 0);
  }
  return counter->load(std::memory_order_acquire) == value;
}
#endif  // Linux
