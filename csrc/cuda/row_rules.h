// What the row updates do with the elements of a row, once the sum of its gradients is there.
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
  // Rounded to nearest, halfway cases away from 0; a NaN keeps no payload, whose rounding might end
  // it.
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

// Each rule: `rate` is the learning rate, and `i` where the elements of `grad` lie in the weight.

template <typename Weight>
struct SgdRule {
  static constexpr bool kRowWise = false;
  Weight weight;

  bool aligned() const { return weight.aligned(); }

  template <int kVector>
  __device__ void update(int64_t i, const float* grad, float rate) const {
    float values[kVector];
    weight.template load<kVector>(i, values);
#pragma unroll
    for (int k = 0; k < kVector; ++k) values[k] -= rate * grad[k];
    weight.template store<kVector>(i, values);
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
  __device__ void update(int64_t i, const float* grad, float rate) const {
    float values[kVector], sums[kVector];
    weight.template load<kVector>(i, values);
    state_sum.load<kVector>(i, sums);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      sums[k] += grad[k] * grad[k];
      values[k] -= rate * grad[k] / (sqrtf(sums[k]) + eps);
    }
    state_sum.store<kVector>(i, sums);
    weight.template store<kVector>(i, values);
  }
};

template <typename Weight>
struct RowWiseAdagradRule {
  static constexpr bool kRowWise = true;
  SgdRule<Weight> sgd;
  float* state_sum;
  float eps;

  bool aligned() const { return sgd.aligned(); }

  // Returns the row's rate. One thread of those that ask for the same row `writes` its state, after
  // all have read it.
  template <typename Barrier>
  __device__ float row_rate(int64_t row, float mean_square, float rate, bool writes,
                            const Barrier& barrier) const {
    const float sum = state_sum[row] + mean_square;
    barrier();
    if (writes) state_sum[row] = sum;
    return rate / (sqrtf(sum) + eps);
  }
  template <int kVector>
  __device__ void update(int64_t i, const float* grad, float rate) const {
    sgd.template update<kVector>(i, grad, rate);
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
  __device__ void update(int64_t i, const float* grad, float rate) const {
    float values[kVector], averages[kVector], squares[kVector];
    weight.template load<kVector>(i, values);
    exp_avg.load<kVector>(i, averages);
    exp_avg_sq.load<kVector>(i, squares);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      averages[k] += (1 - beta1) * (grad[k] - averages[k]);
      squares[k] += (1 - beta2) * (grad[k] * grad[k] - squares[k]);
      values[k] -= rate * averages[k] / (sqrtf(squares[k]) + eps);
    }
    exp_avg.store<kVector>(i, averages);
    exp_avg_sq.store<kVector>(i, squares);
    weight.template store<kVector>(i, values);
  }
};

// What all threads of an update need to know; in device memory.
struct StepNumbers {
  float rate;
  float inverse_scale;
  bool skip;  // nothing is changed
};

// The threads of a group, blockDim.x of one warp, update one row. gradient(column, values) gives
// kVector elements of its scaled gradient.
template <int kVector, typename Rule, typename Gradient>
__device__ void update_row(const Rule& rule, int64_t row, int64_t dim, float rate, int width,
                           int thread, const Gradient& gradient) {
  const int64_t stride = int64_t{width} * kVector;
  float values[kVector];
  bool known = false;
  if constexpr (Rule::kRowWise) {
    const unsigned lane = (threadIdx.y * blockDim.x + threadIdx.x) % kWarp;
    const unsigned group =
        width == kWarp ? kWholeWarp : ((1u << width) - 1) << (lane / width * width);
    float squares = 0;
    for (int64_t column = thread * kVector; column < dim; column += stride) {
      gradient(column, values);
#pragma unroll
      for (int k = 0; k < kVector; ++k) squares += values[k] * values[k];
    }
    for (int bit = width / 2; bit > 0; bit /= 2) {
      squares += __shfl_xor_sync(group, squares, bit);
    }
    known = dim <= stride;
    rate = rule.row_rate(row, squares / static_cast<float>(dim), rate, thread == 0,
                         [&] { __syncwarp(group); });
  }
  for (int64_t column = thread * kVector; column < dim; column += stride) {
    if (!known) gradient(column, values);
    rule.template update<kVector>(row * dim + column, values, rate);
  }
}

}  // namespace dlrm
