// Which instruction set the kernels use: the best that this processor has, found once at run time.
#pragma once

#include <cstdint>

namespace dlrm {

enum class Isa : int64_t { generic, avx2, avx512, avx512_bf16 };

Isa current_isa();
void limit_isa(Isa limit);  // the tests run every kernel that this processor can

}  // namespace dlrm

// Evaluates to the address of `kernel` as for_each_isa.h compiled it for the current instruction
// set. `kernel` may hold commas (template arguments).
#if defined(__x86_64__)
#define DLRM_KERNEL(...)                                                                 \
  (::dlrm::current_isa() == ::dlrm::Isa::avx512_bf16 ? &::dlrm::avx512_bf16::__VA_ARGS__ \
   : ::dlrm::current_isa() == ::dlrm::Isa::avx512    ? &::dlrm::avx512::__VA_ARGS__      \
   : ::dlrm::current_isa() == ::dlrm::Isa::avx2      ? &::dlrm::avx2::__VA_ARGS__        \
                                                     : &::dlrm::generic::__VA_ARGS__)
#else
#define DLRM_KERNEL(...) (&::dlrm::generic::__VA_ARGS__)
#endif
