// Compiles the kernels in DLRM_KERNELS once for each instruction set, each in its own namespace.
//
// The target is set for the functions of these regions only, never for the file: a standard
// library function instantiated here must not carry AVX-512 into a processor that lacks it.

#include "simd_types.h"

#if defined(__clang__)
#define DLRM_BEGIN_TARGET(isa) \
  _Pragma(DLRM_TEXT(clang attribute push(__attribute__((target(isa))), apply_to = function)))
#define DLRM_END_TARGET _Pragma("clang attribute pop")
#else
#define DLRM_BEGIN_TARGET(isa) _Pragma("GCC push_options") _Pragma(DLRM_TEXT(GCC target(isa)))
#define DLRM_END_TARGET _Pragma("GCC pop_options")
#endif
#define DLRM_TEXT(...) #__VA_ARGS__

#if defined(__x86_64__)

DLRM_BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")
#define DLRM_LANES 16
#define DLRM_BF16_DOT 1
namespace dlrm::avx512_bf16 {
#include "simd.h"
#include DLRM_KERNELS
}  // namespace dlrm::avx512_bf16
#undef DLRM_BF16_DOT
#define DLRM_BF16_DOT 0
DLRM_END_TARGET

DLRM_BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace dlrm::avx512 {
#include "simd.h"
#include DLRM_KERNELS
}  // namespace dlrm::avx512
#undef DLRM_LANES
DLRM_END_TARGET

DLRM_BEGIN_TARGET("avx2,fma,f16c")
#define DLRM_LANES 8
namespace dlrm::avx2 {
#include "simd.h"
#include DLRM_KERNELS
}  // namespace dlrm::avx2
#undef DLRM_LANES
DLRM_END_TARGET

#else
#define DLRM_BF16_DOT 0
#endif

#define DLRM_LANES 4
namespace dlrm::generic {
#include "simd.h"
#include DLRM_KERNELS
}  // namespace dlrm::generic
#undef DLRM_LANES
#undef DLRM_BF16_DOT
