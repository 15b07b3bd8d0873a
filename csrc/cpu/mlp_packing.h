// Weights of an MLP packed into panels, for one instruction set; part of mlp_kernels.h.

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

// kLanes units of a row of which `count` elements are left.
template <typename scalar_t>
DLRM_INLINE Vec load_as_units(const float* from, int64_t count) {
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
template <typename scalar_t>
DLRM_INLINE void load_transposed(const MlpLayer& layer, int64_t output, int64_t unit,
                                 Vec (&rows)[kLanes]) {
  const int64_t input = unit * kPerUnit<Unit<scalar_t>>;
  for (int64_t r = 0; r < kLanes; ++r) {
    rows[r] = output + r < layer.outputs
                  ? load_as_units<scalar_t>(layer.weight + (output + r) * layer.inputs + input,
                                            layer.inputs - input)
                  : zero();
  }
  transpose(rows);
}

// A panel of outputs for x W^T: for each unit of inputs, the weights to all outputs of the panel.
template <typename scalar_t>
void pack_of_outputs(const MlpLayer& layer, int64_t panel) {
  using unit_t = Unit<scalar_t>;
  const int64_t depth = units_of<scalar_t>(layer.inputs), first = panel * kPanel;
  const int64_t columns = std::min(kPanel, round_up(layer.outputs - first, kLanes));
  unit_t* to = static_cast<unit_t*>(layer.of_outputs) + first * depth;
  for (int64_t column = 0; column < columns; column += kLanes) {
    const int64_t output = first + column;
    store(layer.start + output,
          rounded<scalar_t>(load_some(layer.bias + output, layer.outputs - output)));
    for (int64_t unit = 0; unit < depth; unit += kLanes) {
      Vec rows[kLanes];
      load_transposed<scalar_t>(layer, output, unit, rows);
      const int64_t some = std::min(kLanes, depth - unit);
      for (int64_t r = 0; r < some; ++r) {
        std::memcpy(to + (unit + r) * columns + column, &rows[r], sizeof(Vec));
      }
    }
  }
}

// A panel of inputs for the gradient of x: for each unit of outputs, the weights of all inputs.
template <typename scalar_t>
void pack_of_inputs(const MlpLayer& layer, int64_t panel) {
  using unit_t = Unit<scalar_t>;
  constexpr int64_t kPer = kPerUnit<unit_t>;
  const int64_t depth = units_of<scalar_t>(layer.outputs), first = panel * kPanel;
  const int64_t columns = std::min(kPanel, round_up(layer.inputs - first, kLanes));
  unit_t* to = static_cast<unit_t*>(layer.of_inputs) + first * depth;
  for (int64_t unit = 0; unit < depth; ++unit) {
    const float* row = layer.weight + unit * kPer * layer.inputs + first;
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
