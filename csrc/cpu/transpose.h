// Blocks of lanes for one instruction set, included after simd.h.

// Swaps rows and columns of kLanes x kLanes lanes.
DLRM_INLINE void transpose(Vec (&rows)[kLanes]) {
#if DLRM_LANES == 16
  __m512 pairs[16], fours[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps((__m512)rows[i], (__m512)rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps((__m512)rows[i], (__m512)rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    const __m512d a = (__m512d)pairs[i], b = (__m512d)pairs[i + 1];
    const __m512d c = (__m512d)pairs[i + 2], d = (__m512d)pairs[i + 3];
    fours[i] = (__m512)_mm512_unpacklo_pd(a, c);
    fours[i + 1] = (__m512)_mm512_unpackhi_pd(a, c);
    fours[i + 2] = (__m512)_mm512_unpacklo_pd(b, d);
    fours[i + 3] = (__m512)_mm512_unpackhi_pd(b, d);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512 a = _mm512_shuffle_f32x4(fours[j], fours[4 + j], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(fours[8 + j], fours[12 + j], 0x88);
    const __m512 c = _mm512_shuffle_f32x4(fours[j], fours[4 + j], 0xdd);
    const __m512 d = _mm512_shuffle_f32x4(fours[8 + j], fours[12 + j], 0xdd);
    rows[j] = (Vec)_mm512_shuffle_f32x4(a, b, 0x88);
    rows[4 + j] = (Vec)_mm512_shuffle_f32x4(c, d, 0x88);
    rows[8 + j] = (Vec)_mm512_shuffle_f32x4(a, b, 0xdd);
    rows[12 + j] = (Vec)_mm512_shuffle_f32x4(c, d, 0xdd);
  }
#elif DLRM_LANES == 8
  __m256 pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps((__m256)rows[i], (__m256)rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps((__m256)rows[i], (__m256)rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    fours[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    fours[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    fours[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    fours[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (int j = 0; j < 4; ++j) {
    rows[j] = (Vec)_mm256_permute2f128_ps(fours[j], fours[4 + j], 0x20);
    rows[4 + j] = (Vec)_mm256_permute2f128_ps(fours[j], fours[4 + j], 0x31);
  }
#else
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < i; ++j) {
      const float lane = rows[i][j];
      rows[i][j] = rows[j][i];
      rows[j][i] = lane;
    }
  }
#endif
}
