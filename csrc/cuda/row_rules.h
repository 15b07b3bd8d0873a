// Updates of the elements of a row, given the sum of its gradients.
#pragma once

#include "../row_update.h"
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

// Rows of a weight (Floats or SplitFloats) with their states, and the rule that updates them.
template <typename Rule, typename Weight>
struct Rows {
  static constexpr bool kRowWise = Rule::kRowWise;
  static constexpr int kStates = kRowWise ? 0 : static_cast<int>(Rule::kStates.size());
  Rule rule;
  Weight weight;
  Floats states[kMostStates];

  bool aligned() const {
    bool all = weight.aligned();
    for (int s = 0; s < kStates; ++s) all = all && states[s].aligned();
    return all;
  }

  // What elements of a row hold before an update; `i` is where they are in the weight.
  template <int kVector>
  struct Held {
    float values[kVector], states[kStates + 1][kVector];
  };
  template <int kVector>
  __device__ void load(int64_t i, Held<kVector>& held) const {
    weight.template load<kVector>(i, held.values);
#pragma unroll
    for (int s = 0; s < kStates; ++s) states[s].template load<kVector>(i, held.states[s]);
  }
  template <int kVector>
  __device__ void update(int64_t i, Held<kVector>& held, const float* grad, float rate) const {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      step(rule, held.values[k], held.states[0][k], held.states[kStates > 1][k], grad[k], rate);
    }
#pragma unroll
    for (int s = 0; s < kStates; ++s) states[s].template store<kVector>(i, held.states[s]);
    weight.template store<kVector>(i, held.values);
  }

 private:
  // One step of an element. That of row-wise Adagrad is SGD's, by the row's rate.
  static __device__ void step(const Sgd&, float& value, float&, float&, float grad, float rate) {
    value -= rate * grad;
  }
  static __device__ void step(const RowWiseAdagrad&, float& value, float&, float&, float grad,
                              float rate) {
    value -= rate * grad;
  }
  static __device__ void step(const Adagrad& rule, float& value, float& sum, float&, float grad,
                              float rate) {
    sum += grad * grad;
    value -= rate * grad / (sqrtf(sum) + rule.eps);
  }
  static __device__ void step(const Adam& rule, float& value, float& average, float& square,
                              float grad, float rate) {
    average += rule.new_of_average * (grad - average);
    square += rule.new_of_square * (grad * grad - square);
    value -= rate * average / (sqrtf(square) + rule.eps);
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
template <int kVector, typename Rows, typename Gradient>
__device__ void update_row(const Rows& rows, int64_t row, int64_t dim, float rate, int width,
                           int thread, const Gradient& gradient) {
  const int64_t stride = int64_t{width} * kVector;
  const int64_t first = int64_t{thread} * kVector;
  float values[kVector];
  typename Rows::template Held<kVector> held;
  if (first < dim) rows.load(row * dim + first, held);
  bool known = false;
  if constexpr (Rows::kRowWise) {
    const float before = rows.states[0].data[row];
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
    const float sum = before + squares / static_cast<float>(dim);
    __syncwarp(group);  // all have read the state
    if (thread == 0) rows.states[0].data[row] = sum;
    rate /= sqrtf(sum) + rows.rule.eps;
  }
  for (int64_t column = first; column < dim; column += stride) {
    if (column > first) rows.load(row * dim + column, held);
    if (!known) gradient(column, values);
    rows.update(row * dim + column, held, values, rate);
  }
}

}  // namespace dlrm
