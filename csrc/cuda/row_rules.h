// Updates of the elements of a row, given the sum of its gradients.
#pragma once

#include "vectors.h"

namespace dlrm {

// A weight in float32.
struct Floats {
  float* data;

  template <int kVector>
  __device__ void load(int64_t i, float* values) const {
    Elements<float, kVector> elements;
    elements.load(data + i);
    elements.get(values);
  }
  template <int kVector>
  __device__ void store(int64_t i, const float* values) const {
    Elements<float, kVector> elements;
    elements.set(values);
    elements.store(data + i);
  }
  bool aligned() const { return is_aligned(data); }
};

// A weight in float32 values kept as two halves: the value rounded to bfloat16, and what its bits
// are more than those, a signed number (see dlrm/ops/split_float32.py).
struct SplitFloats {
  uint16_t* high;
  int16_t* low;

  template <int kVector>
  __device__ void load(int64_t i, float* values) const {
    Elements<uint16_t, kVector> high_words;
    Elements<int16_t, kVector> low_words;
    high_words.load(high + i);
    low_words.load(low + i);
    uint16_t highs[kVector];
    int16_t lows[kVector];
    memcpy(highs, high_words.words, sizeof highs);
    memcpy(lows, low_words.words, sizeof lows);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const auto bits = (static_cast<uint32_t>(highs[k]) << 16) + static_cast<uint32_t>(lows[k]);
      values[k] = __int_as_float(static_cast<int>(bits));
    }
  }
  // Rounded to nearest, halfway cases away from 0; a NaN loses its payload, which rounding could
  // overflow.
  template <int kVector>
  __device__ void store(int64_t i, const float* values) const {
    Elements<uint16_t, kVector> high_words;
    Elements<int16_t, kVector> low_words;
    uint16_t highs[kVector];
    int16_t lows[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const auto bits =
          values[k] != values[k] ? 0x7fc00000u : static_cast<uint32_t>(__float_as_int(values[k]));
      highs[k] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
      lows[k] = static_cast<int16_t>(bits & 0xffffu);
    }
    memcpy(high_words.words, highs, sizeof highs);
    memcpy(low_words.words, lows, sizeof lows);
    high_words.store(high + i);
    low_words.store(low + i);
  }
  bool aligned() const { return is_aligned(high, 8) && is_aligned(low, 8); }
};

// Each rule: `Held` is what the elements of a row hold before the update, `rate` the learning rate,
// and `i` where the elements of `grad` are in the weight.

template <typename Weight>
struct SgdRule {
  static constexpr bool kRowWise = false;
  Weight weight;

  bool aligned() const { return weight.aligned(); }

  template <int kVector>
  struct Held {
    float values[kVector];
  };
  template <int kVector>
  __device__ void load(int64_t i, Held<kVector>& held) const {
    weight.template load<kVector>(i, held.values);
  }
  template <int kVector>
  __device__ void update(int64_t i, Held<kVector>& held, const float* grad, float rate) const {
#pragma unroll
    for (int k = 0; k < kVector; ++k) held.values[k] -= rate * grad[k];
    weight.template store<kVector>(i, held.values);
  }
};

template <typename Weight>
struct AdagradRule {
  static constexpr bool kRowWise = false;
  Weight weight;
  Floats state_sum;
  float eps;

  bool aligned() const { return weight.aligned() && state_sum.aligned(); }

  template <int kVector>
  struct Held {
    float values[kVector], sums[kVector];
  };
  template <int kVector>
  __device__ void load(int64_t i, Held<kVector>& held) const {
    weight.template load<kVector>(i, held.values);
    state_sum.load<kVector>(i, held.sums);
  }
  template <int kVector>
  __device__ void update(int64_t i, Held<kVector>& held, const float* grad, float rate) const {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      held.sums[k] += grad[k] * grad[k];
      held.values[k] -= rate * grad[k] / (sqrtf(held.sums[k]) + eps);
    }
    state_sum.store<kVector>(i, held.sums);
    weight.template store<kVector>(i, held.values);
  }
};

template <typename Weight>
struct RowWiseAdagradRule : SgdRule<Weight> {
  static constexpr bool kRowWise = true;
  float* state_sum;
  float eps;

  // Returns the row's rate, given its state before the update. One thread of those that ask for the
  // same row `writes` its state, after all have read it.
  template <typename Barrier>
  __device__ float row_rate(int64_t row, float before, float mean_square, float rate, bool writes,
                            const Barrier& barrier) const {
    const float sum = before + mean_square;
    barrier();
    if (writes) state_sum[row] = sum;
    return rate / (sqrtf(sum) + eps);
  }
};

template <typename Weight>
struct AdamRule {
  static constexpr bool kRowWise = false;
  Weight weight;
  Floats exp_avg, exp_avg_sq;
  float beta1, beta2, eps;

  bool aligned() const { return weight.aligned() && exp_avg.aligned() && exp_avg_sq.aligned(); }

  template <int kVector>
  struct Held {
    float values[kVector], averages[kVector], squares[kVector];
  };
  template <int kVector>
  __device__ void load(int64_t i, Held<kVector>& held) const {
    weight.template load<kVector>(i, held.values);
    exp_avg.load<kVector>(i, held.averages);
    exp_avg_sq.load<kVector>(i, held.squares);
  }
  template <int kVector>
  __device__ void update(int64_t i, Held<kVector>& held, const float* grad, float rate) const {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      held.averages[k] += (1 - beta1) * (grad[k] - held.averages[k]);
      held.squares[k] += (1 - beta2) * (grad[k] * grad[k] - held.squares[k]);
      held.values[k] -= rate * held.averages[k] / (sqrtf(held.squares[k]) + eps);
    }
    exp_avg.store<kVector>(i, held.averages);
    exp_avg_sq.store<kVector>(i, held.squares);
    weight.template store<kVector>(i, held.values);
  }
};

// Shared parameters of all threads of an update, in device memory.
struct StepNumbers {
  float rate;
  float inverse_scale;
  bool skip;  // nothing is changed
};

// The threads of a group, blockDim.x of one warp, update one row. gradient(column, values) gives
// kVector elements of its scaled gradient. What the row holds is loaded before its gradients are,
// so that none of these loads waits for another.
template <int kVector, typename Rule, typename Gradient>
__device__ void update_row(const Rule& rule, int64_t row, int64_t dim, float rate, int width,
                           int thread, const Gradient& gradient) {
  const int64_t stride = int64_t{width} * kVector;
  const int64_t first = int64_t{thread} * kVector;
  float values[kVector];
  typename Rule::template Held<kVector> held;
  if (first < dim) rule.load(row * dim + first, held);
  bool known = false;
  if constexpr (Rule::kRowWise) {
    const float before = rule.state_sum[row];
    const unsigned lane = (threadIdx.y * blockDim.x + threadIdx.x) % kWarp;
    const unsigned group =
        width == kWarp ? kWholeWarp : ((1u << width) - 1) << (lane / width * width);
    float squares = 0;
    for (int64_t column = first; column < dim; column += stride) {
      gradient(column, values);
#pragma unroll
      for (int k = 0; k < kVector; ++k) squares += values[k] * values[k];
    }
    for (int bit = width / 2; bit > 0; bit /= 2) {
      squares += __shfl_xor_sync(group, squares, bit);
    }
    known = dim <= stride;
    rate = rule.row_rate(row, before, squares / static_cast<float>(dim), rate, thread == 0,
                         [&] { __syncwarp(group); });
  }
  for (int64_t column = first; column < dim; column += stride) {
    if (column > first) rule.load(row * dim + column, held);
    if (!known) gradient(column, values);
    rule.update(row * dim + column, held, values, rate);
  }
}

}  // namespace dlrm
