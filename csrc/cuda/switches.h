// The process's switches; see cuda_switches in dlrm/ops/library.py.
#pragma once

#include <atomic>
#include <cstdint>

namespace dlrm {

enum Switch : int64_t { kAllowTf32 = 1, kDeterministic = 2 };

inline std::atomic<int64_t> switches{0};

inline bool is_on(Switch which) { return (switches.load(std::memory_order_relaxed) & which) != 0; }

}  // namespace dlrm
