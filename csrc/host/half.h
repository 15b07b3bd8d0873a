// Rounds float32 to half precision, as IEEE 754 does by default.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dlrm::host {

#if defined(__x86_64__)

__attribute__((target("f16c"))) inline void to_half(const float* values, int64_t size,
                                                    uint16_t* halves) {
  const auto convert = [](const float* from, uint16_t* to) __attribute__((target("f16c"))) {
    const __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), eight);
  };
  int64_t i = 0;
  for (; i + 8 <= size; i += 8) convert(values + i, halves + i);
  float last[8] = {};
  uint16_t last_halves[8];
  std::memcpy(last, values + i, (size - i) * sizeof(float));
  convert(last, last_halves);
  std::memcpy(halves + i, last_halves, (size - i) * sizeof(uint16_t));
}

inline bool has_half() { return __builtin_cpu_supports("f16c"); }

#elif defined(__aarch64__)

inline void to_half(const float* values, int64_t size, uint16_t* halves) {
  for (int64_t i = 0; i < size; ++i) {
    const auto half = static_cast<__fp16>(values[i]);
    std::memcpy(halves + i, &half, sizeof(half));
  }
}

inline bool has_half() { return true; }

#else

inline void to_half(const float*, int64_t, uint16_t*) {}

inline bool has_half() { return false; }

#endif

}  // namespace dlrm::host
