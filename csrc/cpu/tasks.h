// What tasks report, and tasks of unequal length, which threads take in turn.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace dlrm {

// The smallest position of a bad input that any task reports: the same with any number of threads.
class FirstBad {
 public:
  void report(int64_t position) {
    int64_t seen = first_.load();
    while (position < seen && !first_.compare_exchange_weak(seen, position)) {
    }
  }
  bool any() const { return first_ != INT64_MAX; }
  int64_t position() const { return first_; }

 private:
  std::atomic<int64_t> first_{INT64_MAX};
};

// Calls work(take) in as many threads as there are, where take() returns the next task of `count`,
// or -1 after the last.
template <typename Work>
void take_tasks(int64_t count, const Work& work) {
  std::atomic<int64_t> next{0};
  const auto take = [&] {
    const int64_t task = next.fetch_add(1, std::memory_order_relaxed);
    return task < count ? task : -1;
  };
  const int64_t threads = std::min<int64_t>(count, torch::stable::get_num_threads());
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) work(take);
  });
}

}  // namespace dlrm
