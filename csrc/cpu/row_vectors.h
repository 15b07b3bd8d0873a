// Rows of a weight as vectors, for one instruction set. No include guard: kernels include this once
// for each, inside that set's namespace; see for_each_isa.h.

// The value is the sum of the halves' bits, exactly.
DLRM_INLINE Vec load(SplitFloats from) {
  SignedHalves low;
  std::memcpy(&low, from.low, sizeof low);
  return (Vec)((Bits)load(from.high) + (Bits) __builtin_convertvector(low, SignedBits));
}

// The high half is rounded to nearest, halfway cases away from 0; the low half is the lower bits,
// which as a signed number undo the rounding. A NaN loses its payload, which rounding could
// overflow.
DLRM_INLINE void store(SplitFloats to, Vec v) {
  const Bits is_nan = (Bits)(v != v);
  const Bits bits = ((Bits)v & ~is_nan) | (is_nan & 0x7fc00000);
  store_bytes<false>(to.high, __builtin_convertvector((bits + 0x8000) >> 16, Halves));
  store_bytes<false>(to.low, __builtin_convertvector(bits, Halves));
}

DLRM_INLINE Vec load_first(SplitFloats from, int64_t count) {
  BFloat16 high[kLanes] = {};
  int16_t low[kLanes] = {};
  copy_first(from.high, high, count);
  copy_first(from.low, low, count);
  return load(SplitFloats{high, low});
}

DLRM_INLINE void store_first(SplitFloats to, Vec v, int64_t count) {
  BFloat16 high[kLanes];
  int16_t low[kLanes];
  store(SplitFloats{high, low}, v);
  copy_first(high, to.high, count);
  copy_first(low, to.low, count);
}

// The number of a vector's elements to use: all of them, or the first few.
struct Whole {};
struct First {
  int64_t count;
};

template <typename Pointer>
DLRM_INLINE Vec load(Pointer from, Whole) {
  return load(from);
}
template <typename Pointer>
DLRM_INLINE Vec load(Pointer from, First first) {
  return load_first(from, first.count);
}
#if DLRM_LANES == 16
// Uses the narrowest register: a wider one would touch a cache line that was not prefetched, and
// wait for it without using it.
DLRM_INLINE Vec load(const float* from, First first) {
  const unsigned mask = (1u << first.count) - 1;
  if (first.count <= 4) return (Vec)_mm512_zextps128_ps512(_mm_maskz_loadu_ps(mask, from));
  if (first.count <= 8) return (Vec)_mm512_zextps256_ps512(_mm256_maskz_loadu_ps(mask, from));
  return load_first(from, first.count);
}
DLRM_INLINE Vec load(float* from, First first) {
  return load(static_cast<const float*>(from), first);
}
#endif
template <typename Pointer>
DLRM_INLINE void store(Pointer to, Vec v, Whole) {
  store(to, v);
}
template <typename Pointer>
DLRM_INLINE void store(Pointer to, Vec v, First first) {
  store_first(to, v, first.count);
}

// Calls f(i, part) for the vector of elements from i on, until `dim` are done.
template <typename Function>
DLRM_INLINE void for_each_vector(int64_t dim, const Function& f) {
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) f(i, Whole{});
  if (i < dim) f(i, First{dim - i});
}
