// Vectors of kLanes floats for one instruction set. No include guard: for_each_isa.h includes this
// once for each, inside that set's namespace and target.

constexpr int64_t kLanes = DLRM_LANES;
constexpr bool kBFloat16Dot = DLRM_BF16_DOT;

typedef float Vec __attribute__((vector_size(4 * DLRM_LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * DLRM_LANES)));
typedef int32_t SignedBits __attribute__((vector_size(4 * DLRM_LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * DLRM_LANES)));
typedef int16_t SignedHalves __attribute__((vector_size(2 * DLRM_LANES)));

DLRM_INLINE Vec zero() { return Vec{}; }

DLRM_INLINE Vec broadcast(float value) { return value - Vec{}; }

DLRM_INLINE Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

DLRM_INLINE Vec from_bfloat16(Halves h) { return (Vec)(__builtin_convertvector(h, Bits) << 16); }

DLRM_INLINE Vec load(const BFloat16* from) {
  Halves h;
  std::memcpy(&h, from, sizeof h);
  return from_bfloat16(h);
}

DLRM_INLINE Vec load(const Half* from) {
#if DLRM_LANES == 16
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif DLRM_LANES == 8
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Vec v;
  for (int64_t lane = 0; lane < kLanes; ++lane) v[lane] = static_cast<float>(from[lane]);
  return v;
#endif
}

DLRM_INLINE Halves to_bfloat16(Vec v) {
  const Bits bits = (Bits)v;
  const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  const Bits is_nan = (Bits)(v != v);
  return __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), Halves);
}

DLRM_INLINE Halves to_half(Vec v) {
#if DLRM_LANES == 16
  return (Halves)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif DLRM_LANES == 8
  return (Halves)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#else
  Halves h;
  for (int64_t lane = 0; lane < kLanes; ++lane) h[lane] = static_cast<Half>(v[lane]).x;
  return h;
#endif
}

// Stores write around the caches where kStream says so; the address is then a multiple of the
// vector's size.
template <bool kStream, typename V>
DLRM_INLINE void store_bytes(void* to, V v) {
#if DLRM_LANES >= 8
  if constexpr (kStream && sizeof(V) == 16) {
    return _mm_stream_si128(static_cast<__m128i*>(to), (__m128i)v);
  }
  if constexpr (kStream && sizeof(V) == 32) {
    return _mm256_stream_si256(static_cast<__m256i*>(to), (__m256i)v);
  }
#endif
#if DLRM_LANES == 16
  if constexpr (kStream && sizeof(V) == 64) {
    return _mm512_stream_si512(static_cast<__m512i*>(to), (__m512i)v);
  }
#endif
  std::memcpy(to, &v, sizeof v);
}

template <bool kStream = false>
DLRM_INLINE void store(float* to, Vec v) {
  store_bytes<kStream>(to, v);
}
template <bool kStream = false>
DLRM_INLINE void store(BFloat16* to, Vec v) {
  store_bytes<kStream>(to, to_bfloat16(v));
}
template <bool kStream = false>
DLRM_INLINE void store(Half* to, Vec v) {
  store_bytes<kStream>(to, to_half(v));
}

// Waits until streamed stores can be seen by other threads.
DLRM_INLINE void finish_streaming() {
#if DLRM_LANES >= 8
  _mm_sfence();
#endif
}

// The first `count` < kLanes elements; the other lanes are 0.
#if DLRM_LANES == 16
DLRM_INLINE Vec load_first(const float* from, int64_t count) {
  return (Vec)_mm512_maskz_loadu_ps((1u << count) - 1, from);
}
DLRM_INLINE Vec load_first(const BFloat16* from, int64_t count) {
  return from_bfloat16((Halves)_mm256_maskz_loadu_epi16((1u << count) - 1, from));
}
DLRM_INLINE Vec load_first(const Half* from, int64_t count) {
  return (Vec)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16((1u << count) - 1, from));
}
#else
template <typename scalar_t>
DLRM_INLINE Vec load_first(const scalar_t* from, int64_t count) {
  scalar_t buffer[kLanes] = {};
  for (int64_t lane = 0; lane < count; ++lane) buffer[lane] = from[lane];
  return load(buffer);
}
#endif

// The first kLanes of `count` elements, with zeros behind the last.
template <typename T>
DLRM_INLINE Vec load_some(const T* from, int64_t count) {
  return count >= kLanes ? load(from) : count > 0 ? load_first(from, count) : zero();
}

// Copies `count` < kLanes elements in runs of 8, 4, 2 and 1.
template <typename scalar_t>
DLRM_INLINE void copy_first(const scalar_t* from, scalar_t* to, int64_t count) {
  for (int64_t run = kLanes / 2; run > 0; run /= 2) {
    if (count & run) {
      for (int64_t lane = 0; lane < run; ++lane) to[lane] = from[lane];
      from += run;
      to += run;
    }
  }
}

// Stores the first `count` < kLanes elements. (A masked store of AVX-512 is slower, Zen 4.)
template <typename scalar_t>
DLRM_INLINE void store_first(scalar_t* to, Vec v, int64_t count) {
  scalar_t buffer[kLanes];
  store(buffer, v);
  copy_first(buffer, to, count);
}

DLRM_INLINE Vec square_root(Vec v) {
#if DLRM_LANES == 16
  return (Vec)_mm512_sqrt_ps((__m512)v);
#elif DLRM_LANES == 8
  return (Vec)_mm256_sqrt_ps((__m256)v);
#else
  for (int64_t lane = 0; lane < kLanes; ++lane) v[lane] = std::sqrt(v[lane]);
  return v;
#endif
}

DLRM_INLINE float sum_lanes(Vec v) {
#if DLRM_LANES == 16
  return _mm512_reduce_add_ps((__m512)v);
#else
  float sum = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) sum += v[lane];
  return sum;
#endif
}

// Copies `size` elements, rounding to the target's dtype; those of the same dtype keep their bits.
template <bool kStream = false, typename from_t, typename to_t>
DLRM_INLINE void copy_elements(const from_t* from, to_t* to, int64_t size) {
  int64_t i = 0;
  if constexpr (std::is_same_v<from_t, to_t>) {
    constexpr int64_t kWhole = sizeof(Vec) / sizeof(to_t);
    for (; i + kWhole <= size; i += kWhole) {
      Vec v;
      std::memcpy(&v, from + i, sizeof v);
      store_bytes<kStream>(to + i, v);
    }
    if (i + kLanes <= size) {
      std::memcpy(to + i, from + i, kLanes * sizeof(to_t));
      i += kLanes;
    }
    if (i < size) copy_first(from + i, to + i, size - i);
  } else {
    for (; i + kLanes <= size; i += kLanes) store<kStream>(to + i, load(from + i));
    if (i < size) store_first(to + i, load_first(from + i, size - i), size - i);
  }
}

// Prefetches every cache line of a run of bytes into the second-level cache, which waits for more
// lines at once than the first. The address need not be valid.
DLRM_INLINE void prefetch_bytes(uintptr_t begin, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(begin + byte), 0, 2);
  }
}
