// Weights of an MLP packed into panels, for one instruction set; part of mlp_kernels.h.

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

DLRM_INLINE Halves round_to_bfloat16(Vec v) {
#if DLRM_BF16_DOT
  return (Halves)_mm512_cvtneps_pbh((__m512)v);
#else
  return to_bfloat16(v);
#endif
}

// The values as scalar_t has them.
template <typename scalar_t>
DLRM_INLINE Vec rounded(Vec v) {
  if constexpr (std::is_same_v<scalar_t, float>) return v;
  return from_bfloat16(round_to_bfloat16(v));
}

// Rounded values of two rows, as pairs.
DLRM_INLINE Vec pair_rows(Vec first, Vec second) {
  const Bits low = __builtin_convertvector(round_to_bfloat16(first), Bits);
  const Bits high = __builtin_convertvector(round_to_bfloat16(second), Bits);
  return (Vec)(low | high << 16);
}

// The first kLanes of `count` elements, with zeros behind the last.
template <typename T>
DLRM_INLINE Vec load_some(const T* from, int64_t count) {
  return count >= kLanes ? load(from) : count > 0 ? load_first(from, count) : zero();
}

// kLanes units of a row of which `count` elements are left.
template <typename scalar_t, typename weight_t>
DLRM_INLINE Vec load_as_units(const weight_t* from, int64_t count) {
  if constexpr (std::is_same_v<Unit<scalar_t>, float>) {
    return rounded<scalar_t>(load_some(from, count));
  } else {
    const Halves low = round_to_bfloat16(load_some(from, count));
    const Halves high = round_to_bfloat16(load_some(from + kLanes, count - kLanes));
    Vec units;
    std::memcpy(&units, &low, sizeof low);
    std::memcpy(reinterpret_cast<char*>(&units) + sizeof low, &high, sizeof high);
    return units;
  }
}

// For kLanes units of inputs each, the weights to kLanes outputs.
template <typename scalar_t, typename weight_t>
DLRM_INLINE void load_transposed(const weight_t* weight, const MlpLayer& layer, int64_t output,
                                 int64_t unit, Vec (&rows)[kLanes]) {
  const int64_t input = unit * kPerUnit<Unit<scalar_t>>;
  for (int64_t r = 0; r < kLanes; ++r) {
    rows[r] = output + r < layer.outputs
                  ? load_as_units<scalar_t>(weight + (output + r) * layer.inputs + input,
                                            layer.inputs - input)
                  : zero();
  }
  transpose(rows);
}

// A panel of outputs for x W^T: for each unit of inputs, the weights to all outputs of the panel.
template <typename scalar_t, typename weight_t>
void pack_of_outputs(const MlpLayer& layer, int64_t panel) {
  using unit_t = Unit<scalar_t>;
  const auto* weight = static_cast<const weight_t*>(layer.weight);
  const auto* bias = static_cast<const weight_t*>(layer.bias);
  const int64_t depth = units_of<scalar_t>(layer.inputs), first = panel * kPanel;
  const int64_t columns = std::min(kPanel, round_up(layer.outputs - first, kLanes));
  unit_t* to = static_cast<unit_t*>(layer.of_outputs) + first * depth;
  for (int64_t column = 0; column < columns; column += kLanes) {
    const int64_t output = first + column;
    store(layer.start + output,
          rounded<scalar_t>(load_some(bias + output, layer.outputs - output)));
    for (int64_t unit = 0; unit < depth; unit += kLanes) {
      Vec rows[kLanes];
      load_transposed<scalar_t>(weight, layer, output, unit, rows);
      const int64_t some = std::min(kLanes, depth - unit);
      for (int64_t r = 0; r < some; ++r) {
        std::memcpy(to + (unit + r) * columns + column, &rows[r], sizeof(Vec));
      }
    }
  }
}

// A panel of inputs for the gradient of x: for each unit of outputs, the weights of all inputs.
template <typename scalar_t, typename weight_t>
void pack_of_inputs(const MlpLayer& layer, int64_t panel) {
  using unit_t = Unit<scalar_t>;
  constexpr int64_t kPer = kPerUnit<unit_t>;
  const auto* weight = static_cast<const weight_t*>(layer.weight);
  const int64_t depth = units_of<scalar_t>(layer.outputs), first = panel * kPanel;
  const int64_t columns = std::min(kPanel, round_up(layer.inputs - first, kLanes));
  unit_t* to = static_cast<unit_t*>(layer.of_inputs) + first * depth;
  for (int64_t unit = 0; unit < depth; ++unit) {
    const weight_t* row = weight + unit * kPer * layer.inputs + first;
    for (int64_t column = 0; column < columns; column += kLanes) {
      const int64_t left = layer.inputs - first - column;
      Vec units = rounded<scalar_t>(load_some(row + column, left));
      if constexpr (kPer == 2) {
        const bool pair = unit * 2 + 1 < layer.outputs;
        units = pair_rows(units, pair ? load_some(row + layer.inputs + column, left) : zero());
      }
      std::memcpy(to + unit * columns + column, &units, sizeof units);
    }
  }
}
