// Position of the first bad input, the same with any number of threads.
#pragma once

#include <atomic>
#include <cstdint>

namespace dlrm {

// The smallest position that any task reports.
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

}  // namespace dlrm
