#include "cuda_emulator.h"

#include <setjmp.h>
#include <torch/csrc/stable/library.h>
#include <ucontext.h>

#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../../../csrc/schemas.h"

STABLE_TORCH_LIBRARY(dlrm_emulated, m) { dlrm::define_ops(m); }

namespace emulator {

dim3 thread_index, block_index, block_size, grid_size;

namespace {

constexpr int64_t kStackBytes = 128 * 1024;
constexpr int64_t kHostStackBytes = 1 << 20;  // around the launch, where its arguments are
constexpr int64_t kGuardBytes = 4096;
constexpr unsigned char kGuard = 0x5a;
constexpr unsigned char kFresh = 0xff;  // NaN in every floating type, -1 in integers

int chosen_capability = 90;
int64_t chosen_most_shared = 227 * 1024;
unsigned order_seed = 0;
unsigned long long launches = 0;
int64_t sectors_of_additions = 0;

constexpr uintptr_t kSectorBytes = 32;
bool counting = false;   // what kernels read and write
bool in_kernel = false;  // and not in the emulator

// While it lives, the emulator works for a kernel: its own memory is none of the device's.
struct Inside {
  bool before;
  __attribute__((no_sanitize("thread"))) Inside() {
    before = in_kernel;
    in_kernel = false;
  }
  __attribute__((no_sanitize("thread"))) ~Inside() { in_kernel = before; }
};

struct Traffic {
  int64_t launches = 0, sectors_read = 0, sectors_written = 0, sectors_added_to = 0;
};
std::map<const void*, Traffic> traffic;  // by kernel

struct Barrier {
  const char* name;
  unsigned expected;
  unsigned arrived = 0;
  uint64_t generation = 0;
};

struct Copy {
  void* to;
  const void* from;
  int64_t bytes;
};

struct Fiber {
  dim3 index;
  unsigned rank = 0;
  bool started = false, finished = false;
  jmp_buf place;
  Barrier* waits_for = nullptr;
  uint64_t generation = 0;  // that it waits for the end of
  std::deque<std::vector<Copy>> copies = std::deque<std::vector<Copy>>(1);  // by group
  size_t additions = 0;                                                     // atomic ones
  std::map<uintptr_t, size_t> accesses;                                     // by instruction

  bool can_run() const {
    return !finished && (waits_for == nullptr || waits_for->generation != generation);
  }
};

struct Warp {
  std::map<unsigned, Barrier> barriers;  // by their mask
  uint64_t exchange[32];
  std::vector<std::set<uintptr_t>> sectors;  // of each atomic addition
  // Of what its lanes read and write by the same execution of an instruction.
  std::map<std::pair<uintptr_t, size_t>, std::set<uintptr_t>> read, written;
};

struct Block {
  const std::function<void()>* thread;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  std::vector<unsigned char> shared;
  unsigned char* shared_begin;
  std::string fault;  // that a thread found
  const char* host_stack;
};

Block* block = nullptr;
Fiber* current = nullptr;
jmp_buf scheduler;

std::vector<std::unique_ptr<unsigned char[]>>& stacks() {
  static std::vector<std::unique_ptr<unsigned char[]>> kept;
  return kept;
}

void fiber_main() {
  in_kernel = true;
  (*block->thread)();
  in_kernel = false;
  current->finished = true;
  _longjmp(scheduler, 1);
}

__attribute__((noinline)) void start(Fiber& fiber) {
  while (stacks().size() <= fiber.rank) stacks().emplace_back(new unsigned char[kStackBytes]);
  static ucontext_t here, there;
  getcontext(&there);
  there.uc_stack.ss_sp = stacks()[fiber.rank].get();
  there.uc_stack.ss_size = kStackBytes;
  there.uc_link = nullptr;
  makecontext(&there, fiber_main, 0);
  fiber.started = true;
  swapcontext(&here, &there);  // which is left by a jump
}

__attribute__((noinline)) void resume(Fiber& fiber) {
  current = &fiber;
  thread_index = fiber.index;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  start(fiber);
}

__attribute__((noinline)) void leave() {
  if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
}

void wait_for(Barrier& barrier) {
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    if (order_seed == 0) return;
    current->waits_for = nullptr;
  } else {
    current->waits_for = &barrier;
    current->generation = barrier.generation;
  }
  leave();
}

std::string stuck() {
  std::ostringstream text;
  text << "the emulated block " << block_index.x << " is stuck:";
  int shown = 0;
  for (const Fiber& fiber : block->fibers) {
    if (fiber.finished) continue;
    if (++shown > 4) break;
    text << " thread " << fiber.rank << " waits at " << fiber.waits_for->name << " ("
         << fiber.waits_for->arrived << " of " << fiber.waits_for->expected << " came),";
  }
  const auto finished = std::count_if(block->fibers.begin(), block->fibers.end(),
                                      [](const Fiber& fiber) { return fiber.finished; });
  text << " and " << finished << " threads have ended";
  return text.str();
}

void check_guards(int64_t shared_bytes) {
  const auto broken = [](unsigned char byte) { return byte != kGuard; };
  const unsigned char* end = block->shared_begin + shared_bytes;
  if (std::any_of(block->shared_begin - kGuardBytes, block->shared_begin, broken) ||
      std::any_of(end, end + kGuardBytes, broken)) {
    throw std::runtime_error("an emulated block wrote outside its " + std::to_string(shared_bytes) +
                             " bytes of shared memory");
  }
}

void run_block(std::vector<unsigned>& order, std::minstd_rand& random) {
  for (size_t unfinished = order.size(); unfinished > 0;) {
    if (order_seed != 0) std::shuffle(order.begin(), order.end(), random);
    bool any = false;
    for (const unsigned rank : order) {
      Fiber& fiber = block->fibers[rank];
      if (!fiber.can_run()) continue;
      any = true;
      resume(fiber);
      unfinished -= fiber.finished;
    }
    if (!any) throw std::runtime_error(stuck());
  }
}

}  // namespace

void run(dim3 grid, dim3 size, int64_t shared_bytes, const std::function<void()>& thread,
         const void* kernel) {
  const unsigned threads = size.x * size.y * size.z;
  if (threads > 1024) throw std::runtime_error("more than 1024 threads of an emulated block");
  if (shared_bytes > chosen_most_shared) {
    throw std::runtime_error("more shared memory than the emulated device has");
  }
  std::minstd_rand random(order_seed);
  std::vector<unsigned> order(threads);
  std::iota(order.begin(), order.end(), 0u);
  Block own{&thread, {}, {}, {"__syncthreads", threads}, {}, nullptr, "", nullptr};
  own.host_stack = reinterpret_cast<const char*>(&own);
  own.shared.resize(shared_bytes + 2 * kGuardBytes + 128);
  own.shared_begin = own.shared.data() + kGuardBytes;
  own.shared_begin += 127 - (reinterpret_cast<uintptr_t>(own.shared_begin) + 127) % 128;
  block = &own;
  Traffic& counts = traffic[kernel];
  ++counts.launches;
  grid_size = grid;
  block_size = size;
  std::vector<unsigned> blocks(grid.x);
  std::iota(blocks.begin(), blocks.end(), 0u);
  if (order_seed != 0) std::shuffle(blocks.begin(), blocks.end(), random);
  for (const unsigned x : blocks) {
    block_index = dim3(x);
    std::fill(own.shared.begin(), own.shared.end(), kGuard);
    std::fill_n(own.shared_begin, shared_bytes, kFresh);
    own.fibers.assign(threads, {});
    own.warps.assign((threads + 31) / 32, {});
    for (unsigned rank = 0; rank < threads; ++rank) {
      own.fibers[rank].rank = rank;
      own.fibers[rank].index = dim3(rank % size.x, rank / size.x % size.y, rank / size.x / size.y);
    }
    run_block(order, random);
    if (!own.fault.empty()) throw std::runtime_error(own.fault);
    check_guards(shared_bytes);
    for (const Warp& warp : own.warps) {
      for (const auto& sectors : warp.sectors) {
        sectors_of_additions += sectors.size();
        counts.sectors_added_to += sectors.size();
      }
      for (const auto& [_, sectors] : warp.read) counts.sectors_read += sectors.size();
      for (const auto& [_, sectors] : warp.written) counts.sectors_written += sectors.size();
    }
  }
  block = nullptr;
}

unsigned char* shared_memory() {
  const Inside inside;
  return block->shared_begin;
}
int capability() { return chosen_capability; }
int64_t most_shared() { return chosen_most_shared; }
unsigned long long next_launch() { return ++launches; }
unsigned lane() {
  const Inside inside;
  return current->rank % 32;
}
uint64_t* exchange() {
  const Inside inside;
  return block->warps[current->rank / 32].exchange;
}

namespace {

template <typename Sectors>
void insert_sectors(Sectors& sectors, uintptr_t begin, uintptr_t bytes) {
  for (auto sector = begin / kSectorBytes; sector * kSectorBytes < begin + bytes; ++sector) {
    sectors.insert(sector);
  }
}

extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end;  // of this library

// Whether it is memory of the device: neither a stack nor shared memory, nor the library's own.
bool is_global(uintptr_t address) {
  const auto within = [address](const void* begin, int64_t bytes) {
    return address - reinterpret_cast<uintptr_t>(begin) < static_cast<uintptr_t>(bytes);
  };
  return !within(stacks()[current->rank].get(), kStackBytes) &&
         !within(block->host_stack - kHostStackBytes, 2 * kHostStackBytes) &&
         !within(block->shared.data(), block->shared.size()) &&
         !within(block->warps.data(), block->warps.size() * sizeof(Warp)) &&
         !within(&__ehdr_start, &_end - &__ehdr_start);
}

void access(const void* address, int64_t bytes, const void* instruction, bool writes) {
  const Inside inside;
  const auto begin = reinterpret_cast<uintptr_t>(address);
  if (!is_global(begin)) return;
  const auto which = reinterpret_cast<uintptr_t>(instruction);
  const size_t before = current->accesses[which]++;
  Warp& warp = block->warps[current->rank / 32];
  insert_sectors((writes ? warp.written : warp.read)[{which, before}], begin, bytes);
}

}  // namespace

void count_sectors(const void* address, int64_t bytes) {
  const Inside inside;
  if (bytes == 16 && chosen_capability < 90) {
    block->fault = "an emulated GPU below 9.0 adds no four floats by one atomic operation";
  }
  auto& sectors = block->warps[current->rank / 32].sectors;
  const size_t which = current->additions++;
  if (sectors.size() <= which) sectors.resize(which + 1);
  insert_sectors(sectors[which], reinterpret_cast<uintptr_t>(address), bytes);
}

void copy_later(void* to, const void* from, int64_t bytes) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % bytes != 0) {
    block->fault = "an emulated copy of " + std::to_string(bytes) + " bytes is not aligned to them";
  }
  if (counting) access(from, bytes, __builtin_return_address(0), false);
  const Inside inside;
  current->copies.back().push_back({to, from, bytes});
}
void end_group_of_copies() {
  const Inside inside;
  current->copies.emplace_back();
}
void copy_all_but(unsigned groups) {
  const Inside inside;
  for (; current->copies.size() > groups + 1; current->copies.pop_front()) {
    for (const Copy& copy : current->copies.front()) std::memcpy(copy.to, copy.from, copy.bytes);
  }
}

void wait_for_block() {
  const Inside inside;
  wait_for(block->barrier);
}

void wait_for_warp(unsigned mask) {
  const Inside inside;
  auto& barriers = block->warps[current->rank / 32].barriers;
  const auto found = barriers.try_emplace(
      mask, Barrier{"a barrier of its warp", static_cast<unsigned>(__builtin_popcount(mask))});
  wait_for(found.first->second);
}

}  // namespace emulator

// What device is emulated; the order of threads and blocks is drawn from `seed` unless it is 0.
extern "C" __attribute__((visibility("default"))) void configure_emulator(unsigned seed,
                                                                          int capability,
                                                                          int64_t most_shared) {
  emulator::order_seed = seed;
  emulator::chosen_capability = capability;
  emulator::chosen_most_shared = most_shared;
  emulator::launches = 0;
  emulator::sectors_of_additions = 0;
  emulator::counting = false;
  emulator::traffic.clear();
}

// Counts what kernels read and write from now on.
extern "C" __attribute__((visibility("default"))) void count_accesses() {
  emulator::counting = true;
  emulator::traffic.clear();
}

// Writes to `counts` launches of a kernel and the sectors that its warps have read, written and
// added to by atomic operations, and to `offset` where in this file the kernel is; of no kernel
// where there are no more.
extern "C" __attribute__((visibility("default"))) bool kernel_traffic(int64_t index,
                                                                      int64_t* offset,
                                                                      int64_t* counts) {
  if (index >= static_cast<int64_t>(emulator::traffic.size())) return false;
  const auto& [kernel, found] = *std::next(emulator::traffic.begin(), index);
  *offset = static_cast<const char*>(kernel) - &emulator::__ehdr_start;
  counts[0] = found.launches;
  counts[1] = found.sectors_read;
  counts[2] = found.sectors_written;
  counts[3] = found.sectors_added_to;
  return true;
}

// Those that atomic additions have reached since the emulator was configured, each counted as often
// as warps reached it.
extern "C" __attribute__((visibility("default"))) int64_t sectors_of_additions() {
  return emulator::sectors_of_additions;
}

// The compiler calls these at each access (-fsanitize=thread), in place of its own library's.
#define DLRM_HOOK extern "C" __attribute__((no_sanitize("thread"))) void
#define DLRM_ACCESS(name, bytes, writes)                                     \
  DLRM_HOOK name(void* address) {                                            \
    if (emulator::counting && emulator::in_kernel) {                         \
      emulator::access(address, bytes, __builtin_return_address(0), writes); \
    }                                                                        \
  }
#define DLRM_ACCESSES(bytes)                              \
  DLRM_ACCESS(__tsan_read##bytes, bytes, false)           \
  DLRM_ACCESS(__tsan_write##bytes, bytes, true)           \
  DLRM_ACCESS(__tsan_unaligned_read##bytes, bytes, false) \
  DLRM_ACCESS(__tsan_unaligned_write##bytes, bytes, true)
DLRM_ACCESSES(1)
DLRM_ACCESSES(2)
DLRM_ACCESSES(4)
DLRM_ACCESSES(8)
DLRM_ACCESSES(16)
DLRM_HOOK __tsan_read_range(void* address, size_t bytes) {
  if (emulator::counting && emulator::in_kernel) {
    emulator::access(address, bytes, __builtin_return_address(0), false);
  }
}
DLRM_HOOK __tsan_write_range(void* address, size_t bytes) {
  if (emulator::counting && emulator::in_kernel) {
    emulator::access(address, bytes, __builtin_return_address(0), true);
  }
}
DLRM_HOOK __tsan_vptr_update(void**, void*) {}
DLRM_HOOK __tsan_func_entry(void*) {}
DLRM_HOOK __tsan_func_exit() {}
DLRM_HOOK __tsan_init() {}

// Atomic operations of the host go there, too.
#define DLRM_ATOMICS(bits, type)                                                          \
  extern "C" __attribute__((no_sanitize("thread"))) type __tsan_atomic##bits##_load(      \
      const volatile type* from, int) {                                                   \
    return __atomic_load_n(from, __ATOMIC_SEQ_CST);                                       \
  }                                                                                       \
  DLRM_HOOK __tsan_atomic##bits##_store(volatile type* to, type value, int) {             \
    __atomic_store_n(to, value, __ATOMIC_SEQ_CST);                                        \
  }                                                                                       \
  extern "C" __attribute__((no_sanitize("thread"))) type __tsan_atomic##bits##_fetch_add( \
      volatile type* at, type value, int) {                                               \
    return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);                               \
  }
DLRM_ATOMICS(8, uint8_t)
DLRM_ATOMICS(32, uint32_t)
DLRM_ATOMICS(64, uint64_t)
