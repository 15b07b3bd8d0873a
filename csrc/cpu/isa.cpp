#include "isa.h"

#include <algorithm>
#include <atomic>

namespace dlrm {
namespace {

Isa best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) return Isa::avx512_bf16;
  if (avx512) return Isa::avx512;
  if (avx2) return Isa::avx2;
#endif
  return Isa::generic;
}

std::atomic<Isa> isa{best_isa()};

}  // namespace

Isa current_isa() { return isa.load(std::memory_order_relaxed); }

void limit_isa(Isa limit) { isa = std::min(limit, best_isa()); }

}  // namespace dlrm
