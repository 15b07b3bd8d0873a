// An MLP of a few rows, whose weights are not packed, for one instruction set; part of
// mlp_kernels.h.

template <typename scalar_t, typename weight_t, int kRows>
DLRM_INLINE void few_rows_of(const MlpLayer& layer, const Stored<scalar_t>* values,
                             Stored<scalar_t>* to, int64_t stride, int64_t begin, int64_t end) {
  using unit_t = Unit<scalar_t>;
  constexpr int64_t kPer = kPerUnit<unit_t>;
  const auto* weight = static_cast<const weight_t*>(layer.weight);
  const auto* bias = static_cast<const weight_t*>(layer.bias);
  const int64_t depth = units_of<scalar_t>(layer.inputs);
  for (int64_t output = begin; output < end; output += kLanes) {
    Vec acc[kRows];
    for (int r = 0; r < kRows; ++r) {
      acc[r] = rounded<scalar_t>(load_some(bias + output, layer.outputs - output));
    }
    const auto add = [&](const Vec(&weights)[kLanes], int64_t unit,
                         int64_t count) DLRM_ALWAYS_INLINE {
      for (int64_t k = 0; k < count; ++k) {
        for (int r = 0; r < kRows; ++r) {
          const Vec value = broadcast_unit(values + r * stride + (unit + k) * kPer);
          acc[r] = multiply_add<unit_t>(value, weights[k], acc[r]);
        }
      }
    };
    const bool whole_outputs = output + kLanes <= layer.outputs;
    int64_t unit = 0;
    for (; whole_outputs && (unit + kLanes) * kPer <= layer.inputs; unit += kLanes) {
      Vec weights[kLanes];
      for (int r = 0; r < kLanes; ++r) {
        const weight_t* from = weight + (output + r) * layer.inputs + unit * kPer;
        weights[r] = load_as_units<scalar_t>(from, kLanes * kPer);
      }
      transpose(weights);
      add(weights, unit, kLanes);
    }
    for (; unit < depth; unit += kLanes) {
      Vec weights[kLanes];
      load_transposed<scalar_t>(weight, layer, output, unit, weights);
      add(weights, unit, std::min(kLanes, depth - unit));
    }
    for (int r = 0; r < kRows; ++r) {
      Target<scalar_t>::put_values(to + r * stride + output, positive(acc[r]));
    }
  }
}

// For a few rows it takes longer to store packed weights than to multiply. Whole vectors of outputs
// from `begin` on, for rows of values, [rows, stride] with zeros behind the inputs; each value is
// that of forward_run.
template <typename scalar_t, typename weight_t>
void few_rows(const MlpLayer& layer, const void* from, void* to, int64_t stride, int64_t rows,
              int64_t begin, int64_t end) {
  const auto* values = static_cast<const Stored<scalar_t>*>(from);
  auto* target = static_cast<Stored<scalar_t>*>(to);
  const auto run = [&](auto count) {
    few_rows_of<scalar_t, weight_t, decltype(count)::value>(layer, values, target, stride, begin,
                                                            end);
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
