// Products of 32-bit units for one instruction set, included after simd.h: a unit is a float, or a
// pair of bf16 where the processor multiplies such pairs.

template <typename scalar_t>
using Unit =
    std::conditional_t<kBFloat16Dot && std::is_same_v<scalar_t, BFloat16>, BFloat16Pair, float>;

template <typename unit_t>
constexpr int64_t kPerUnit = std::is_same_v<unit_t, float> ? 1 : 2;

DLRM_INLINE int64_t round_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

template <typename unit_t>
DLRM_INLINE Vec load_units(const unit_t* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <typename unit_t>
DLRM_INLINE Vec broadcast_unit(const unit_t* from) {
  float unit;
  std::memcpy(&unit, from, sizeof unit);
  return broadcast(unit);
}

// acc + a * b in each lane; of bf16 pairs, both products are added.
template <typename unit_t>
DLRM_INLINE Vec multiply_add(Vec a, Vec b, Vec acc) {
#if DLRM_BF16_DOT
  if constexpr (std::is_same_v<unit_t, BFloat16Pair>) {
    return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
  }
#endif
  return acc + a * b;
}

DLRM_INLINE Halves round_to_bfloat16(Vec v) {
#if DLRM_BF16_DOT
  return (Halves)_mm512_cvtneps_pbh((__m512)v);
#else
  return to_bfloat16(v);
#endif
}
