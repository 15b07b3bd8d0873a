// An MLP of a few rows, whose weights are not packed, for one instruction set; part of
// mlp_kernels.h.

// Each row of weights is read on its own, and there are more of them than the processor follows.
constexpr int64_t kWeightsAheadBytes = 256;

// kVectors vectors of outputs from `output` on. One vector's sums wait for each other, so two take
// hardly longer than one.
template <typename scalar_t, int kRows, int kVectors>
DLRM_INLINE void few_outputs_of(const MlpLayer& layer, const Stored<scalar_t>* values,
                                Stored<scalar_t>* to, int64_t stride, int64_t output) {
  using unit_t = Unit<scalar_t>;
  constexpr int64_t kPer = kPerUnit<unit_t>;
  const int64_t depth = units_of<scalar_t>(layer.inputs);
  Vec acc[kVectors][kRows];
  for (int v = 0; v < kVectors; ++v) {
    const int64_t first = output + v * kLanes;
    for (int r = 0; r < kRows; ++r) {
      acc[v][r] = rounded<scalar_t>(load_some(layer.bias + first, layer.outputs - first));
    }
  }
  const auto add = [&](int v, const Vec(&weights)[kLanes], int64_t unit,
                       int64_t count) DLRM_ALWAYS_INLINE {
    for (int64_t k = 0; k < count; ++k) {
      for (int r = 0; r < kRows; ++r) {
        const Vec value = broadcast_unit(values + r * stride + (unit + k) * kPer);
        acc[v][r] = multiply_add<unit_t>(value, weights[k], acc[v][r]);
      }
    }
  };
  const bool whole_outputs = output + kVectors * kLanes <= layer.outputs;
  int64_t unit = 0;
  for (; whole_outputs && (unit + kLanes) * kPer <= layer.inputs; unit += kLanes) {
    for (int v = 0; v < kVectors; ++v) {
      Vec weights[kLanes];
      for (int r = 0; r < kLanes; ++r) {
        const int64_t row = output + v * kLanes + r;
        const float* from = layer.weight + row * layer.inputs + unit * kPer;
        prefetch_bytes(reinterpret_cast<uintptr_t>(from) + kWeightsAheadBytes, 1);
        weights[r] = load_as_units<scalar_t>(from, kLanes * kPer);
      }
      transpose(weights);
      add(v, weights, unit, kLanes);
    }
  }
  for (; unit < depth; unit += kLanes) {
    for (int v = 0; v < kVectors; ++v) {
      Vec weights[kLanes];
      load_transposed<scalar_t>(layer, output + v * kLanes, unit, weights);
      add(v, weights, unit, std::min(kLanes, depth - unit));
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    for (int r = 0; r < kRows; ++r) {
      Target<scalar_t>::put_values(to + r * stride + output + v * kLanes, positive(acc[v][r]));
    }
  }
}

template <typename scalar_t, int kRows>
DLRM_INLINE void few_rows_of(const MlpLayer& layer, const Stored<scalar_t>* values,
                             Stored<scalar_t>* to, int64_t stride, int64_t begin, int64_t end) {
  int64_t output = begin;
  for (; output + 2 * kLanes <= std::min(end, layer.outputs); output += 2 * kLanes) {
    few_outputs_of<scalar_t, kRows, 2>(layer, values, to, stride, output);
  }
  for (; output < end; output += kLanes) {
    few_outputs_of<scalar_t, kRows, 1>(layer, values, to, stride, output);
  }
}

// For a few rows it takes longer to store packed weights than to multiply. Whole vectors of outputs
// from `begin` on, for rows of values, [rows, stride] with zeros behind the inputs; each value is
// that of forward_run.
template <typename scalar_t>
void few_rows(const MlpLayer& layer, const void* from, void* to, int64_t stride, int64_t rows,
              int64_t begin, int64_t end) {
  const auto* values = static_cast<const Stored<scalar_t>*>(from);
  auto* target = static_cast<Stored<scalar_t>*>(to);
  const auto run = [&](auto count) {
    few_rows_of<scalar_t, decltype(count)::value>(layer, values, target, stride, begin, end);
  };
  static_assert(kFewRows == 4);
  switch (rows) {
    case 1:
      return run(std::integral_constant<int, 1>());
    case 2:
      return run(std::integral_constant<int, 2>());
    case 3:
      return run(std::integral_constant<int, 3>());
    case 4:
      return run(std::integral_constant<int, 4>());
  }
}

// Copies rows from a tensor to [rows, stride] of zeros, and back.
template <typename scalar_t>
void take_few_rows(const scalar_t* from, int64_t width, void* to, int64_t stride, int64_t rows) {
  auto* target = static_cast<Stored<scalar_t>*>(to);
  for (int64_t r = 0; r < rows; ++r) copy_elements(from + r * width, target + r * stride, width);
}
template <typename scalar_t>
void give_few_rows(const void* from, int64_t stride, scalar_t* to, int64_t width, int64_t rows) {
  const auto* values = static_cast<const Stored<scalar_t>*>(from);
  for (int64_t r = 0; r < rows; ++r) copy_elements(values + r * stride, to + r * width, width);
}
template <typename scalar_t>
void logits_of_few_rows(const MlpLogit& logit, const void* from, int64_t stride, float* to,
                        int64_t width, int64_t rows) {
  const auto* values = static_cast<const Stored<scalar_t>*>(from);
  for (int64_t r = 0; r < rows; ++r) {
    to[r] = logit_of(logit, width, [&](int64_t i) { return values + r * stride + i; });
  }
}
