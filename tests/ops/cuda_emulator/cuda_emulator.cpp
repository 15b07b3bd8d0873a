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
#include <vector>

#include "../../../csrc/schemas.h"

STABLE_TORCH_LIBRARY(dlrm_emulated, m) { dlrm::define_ops(m); }

namespace emulator {

dim3 thread_index, block_index, block_size, grid_size;

namespace {

constexpr int64_t kStackBytes = 128 * 1024;
constexpr int64_t kGuardBytes = 4096;
constexpr unsigned char kGuard = 0x5a;
constexpr unsigned char kFresh = 0xff;  // NaN in every floating type, -1 in integers

int chosen_capability = 90;
int64_t chosen_most_shared = 227 * 1024;
unsigned order_seed = 0;
unsigned long long launches = 0;
int64_t sectors_of_additions = 0;

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

  bool can_run() const {
    return !finished && (waits_for == nullptr || waits_for->generation != generation);
  }
};

struct Warp {
  std::map<unsigned, Barrier> barriers;  // by their mask
  uint64_t exchange[32];
  std::vector<std::set<uintptr_t>> sectors;  // of each atomic addition
};

struct Block {
  const std::function<void()>* thread;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  std::vector<unsigned char> shared;
  unsigned char* shared_begin;
  std::string fault;  // that a thread found
};

Block* block = nullptr;
Fiber* current = nullptr;
jmp_buf scheduler;

std::vector<std::unique_ptr<unsigned char[]>>& stacks() {
  static std::vector<std::unique_ptr<unsigned char[]>> kept;
  return kept;
}

void fiber_main() {
  (*block->thread)();
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

void run(dim3 grid, dim3 size, int64_t shared_bytes, const std::function<void()>& thread) {
  const unsigned threads = size.x * size.y * size.z;
  if (threads > 1024) throw std::runtime_error("more than 1024 threads of an emulated block");
  if (shared_bytes > chosen_most_shared) {
    throw std::runtime_error("more shared memory than the emulated device has");
  }
  std::minstd_rand random(order_seed);
  std::vector<unsigned> order(threads);
  std::iota(order.begin(), order.end(), 0u);
  Block own{&thread, {}, {}, {"__syncthreads", threads}, {}, nullptr, ""};
  own.shared.resize(shared_bytes + 2 * kGuardBytes + 128);
  own.shared_begin = own.shared.data() + kGuardBytes;
  own.shared_begin += 127 - (reinterpret_cast<uintptr_t>(own.shared_begin) + 127) % 128;
  block = &own;
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
      for (const auto& sectors : warp.sectors) sectors_of_additions += sectors.size();
    }
  }
  block = nullptr;
}

unsigned char* shared_memory() { return block->shared_begin; }
int capability() { return chosen_capability; }
int64_t most_shared() { return chosen_most_shared; }
unsigned long long next_launch() { return ++launches; }
unsigned lane() { return current->rank % 32; }
uint64_t* exchange() { return block->warps[current->rank / 32].exchange; }

void count_sectors(const void* address, int64_t bytes) {
  if (bytes == 16 && chosen_capability < 90) {
    block->fault = "an emulated GPU below 9.0 adds no four floats by one atomic operation";
  }
  constexpr uintptr_t kSectorBytes = 32;
  auto& sectors = block->warps[current->rank / 32].sectors;
  const size_t which = current->additions++;
  if (sectors.size() <= which) sectors.resize(which + 1);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  for (auto sector = begin / kSectorBytes; sector * kSectorBytes < begin + bytes; ++sector) {
    sectors[which].insert(sector);
  }
}

void copy_later(void* to, const void* from, int64_t bytes) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % bytes != 0) {
    block->fault = "an emulated copy of " + std::to_string(bytes) + " bytes is not aligned to them";
  }
  current->copies.back().push_back({to, from, bytes});
}
void end_group_of_copies() { current->copies.emplace_back(); }
void copy_all_but(unsigned groups) {
  for (; current->copies.size() > groups + 1; current->copies.pop_front()) {
    for (const Copy& copy : current->copies.front()) std::memcpy(copy.to, copy.from, copy.bytes);
  }
}

void wait_for_block() { wait_for(block->barrier); }

void wait_for_warp(unsigned mask) {
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
}

// Those that atomic additions have reached since the emulator was configured, each counted as often
// as warps reached it.
extern "C" __attribute__((visibility("default"))) int64_t sectors_of_additions() {
  return emulator::sectors_of_additions;
}
