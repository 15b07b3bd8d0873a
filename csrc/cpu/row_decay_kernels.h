// Kernels of the L2 term for one instruction set; see for_each_isa.h.
//
// Vectors of a row are read once, get all the steps that the row has missed, and are written once.

#include "row_vectors.h"

constexpr int kVectorsAtOnce = 4;  // whose square roots and divisions overlap

// numerator / (the root of the square + eps), to 2^-21, for eps above 1e-12. AVX-512's estimates
// with a step of Newton's each take a third of the time of its root and division.
DLRM_INLINE Vec over_root(Vec numerator, Vec square, Vec eps) {
#if DLRM_LANES == 16
  const Vec above_zero = (Vec)_mm512_max_ps((__m512)square, _mm512_set1_ps(1e-30f));
  Vec inverse_root = (Vec)_mm512_rsqrt14_ps((__m512)above_zero);
  inverse_root *= 1.5f - 0.5f * above_zero * inverse_root * inverse_root;
  const Vec divisor = above_zero * inverse_root + eps;
  const Vec inverse = (Vec)_mm512_rcp14_ps((__m512)divisor);
  return numerator * (inverse * (2.0f - divisor * inverse));
#else
  return numerator / (square_root(square) + eps);
#endif
}

template <typename Weight>
struct AdagradElements {
  Vec weight, sum;
};
template <typename Weight, typename Part>
DLRM_INLINE AdagradElements<Weight> elements_of(const AdagradDecay<Weight>& rule, int64_t i,
                                                Part part) {
  return {load(rule.weight + i, part), load(rule.state_sum + i, part)};
}
template <int kVectors, typename Weight>
DLRM_INLINE void decay(const AdagradDecay<Weight>& rule, int64_t begin, int64_t end,
                       AdagradElements<Weight> (&elements)[kVectors]) {
  const Vec l2 = broadcast(rule.l2), eps = broadcast(rule.eps);
  for (int64_t step = begin; step < end; ++step) {
    const Vec lr = broadcast(rule.steps[step]);
    for (int k = 0; k < kVectors; ++k) {
      auto& [weight, sum] = elements[k];
      const Vec gradient = l2 * weight;
      sum += gradient * gradient;
      weight -= over_root(lr * gradient, sum, eps);
    }
  }
}
template <typename Weight, typename Part>
DLRM_INLINE void put(const AdagradDecay<Weight>& rule, int64_t i, Part part,
                     const AdagradElements<Weight>& elements) {
  store(rule.weight + i, elements.weight, part);
  store(rule.state_sum + i, elements.sum, part);
}

template <typename Weight>
struct AdamElements {
  Vec weight, average, square;
};
template <typename Weight, typename Part>
DLRM_INLINE AdamElements<Weight> elements_of(const AdamDecay<Weight>& rule, int64_t i, Part part) {
  return {load(rule.weight + i, part), load(rule.exp_avg + i, part),
          load(rule.exp_avg_sq + i, part)};
}
template <int kVectors, typename Weight>
DLRM_INLINE void decay(const AdamDecay<Weight>& rule, int64_t begin, int64_t end,
                       AdamElements<Weight> (&elements)[kVectors]) {
  const Vec l2 = broadcast(rule.l2);
  const Vec new_of_average = broadcast(rule.new_of_average);
  const Vec new_of_square = broadcast(rule.new_of_square);
  for (int64_t step = begin; step < end; ++step) {
    const Vec step_size = broadcast(rule.steps[2 * step]);
    const Vec eps = broadcast(rule.steps[2 * step + 1]);
    for (int k = 0; k < kVectors; ++k) {
      auto& [weight, average, square] = elements[k];
      const Vec gradient = l2 * weight;
      average += new_of_average * (gradient - average);
      square += new_of_square * (gradient * gradient - square);
      weight -= over_root(step_size * average, square, eps);
    }
  }
}
template <typename Weight, typename Part>
DLRM_INLINE void put(const AdamDecay<Weight>& rule, int64_t i, Part part,
                     const AdamElements<Weight>& elements) {
  store(rule.weight + i, elements.weight, part);
  store(rule.exp_avg + i, elements.average, part);
  store(rule.exp_avg_sq + i, elements.square, part);
}

template <int kVectors, typename Rule, typename Part>
DLRM_INLINE void decay_vectors(const Rule& rule, int64_t i, Part part, int64_t begin, int64_t end) {
  decltype(elements_of(rule, i, part)) elements[kVectors];
  for (int k = 0; k < kVectors; ++k) elements[k] = elements_of(rule, i + k * kLanes, part);
  decay(rule, begin, end, elements);
  for (int k = 0; k < kVectors; ++k) put(rule, i + k * kLanes, part, elements[k]);
}

// The steps of an element do not depend on others of its row, so a run covers elements.
template <typename Rule>
DLRM_INLINE void decay_run(const Rule& rule, const LateRows& run, int64_t dim, int64_t end) {
  const int64_t last = (run.row + run.count) * dim;
  int64_t i = run.row * dim;
  for (; i + kVectorsAtOnce * kLanes <= last; i += kVectorsAtOnce * kLanes) {
    decay_vectors<kVectorsAtOnce>(rule, i, Whole{}, run.begin, end);
  }
  for (; i + kLanes <= last; i += kLanes) {
    decay_vectors<1>(rule, i, Whole{}, run.begin, end);
  }
  if (i < last) decay_vectors<1>(rule, i, First{last - i}, run.begin, end);
}

// One row of each run at a time; they get the steps missed by all of them together.
template <typename Rule>
DLRM_INLINE void decay_together(const Rule& rule, const LateRows* runs, int64_t dim, int64_t end) {
  int64_t together = runs[0].begin;
  for (int k = 1; k < kVectorsAtOnce; ++k) together = std::max<int64_t>(together, runs[k].begin);
  for_each_vector(dim, [&](int64_t i, auto part) DLRM_ALWAYS_INLINE {
    decltype(elements_of(rule, i, part)) elements[kVectorsAtOnce];
    for (int k = 0; k < kVectorsAtOnce; ++k) {
      decltype(elements_of(rule, i, part)) own[1] = {
          elements_of(rule, runs[k].row * dim + i, part)};
      decay(rule, runs[k].begin, together, own);
      elements[k] = own[0];
    }
    decay(rule, together, end, elements);
    for (int k = 0; k < kVectorsAtOnce; ++k) put(rule, runs[k].row * dim + i, part, elements[k]);
  });
}

template <typename Rule>
void decay_rows(const Rule& rule, const LateRows* runs, int64_t count, int64_t dim, int64_t end) {
  for (int64_t i = 0; i < count;) {
    bool short_ones = i + kVectorsAtOnce <= count && dim < kVectorsAtOnce * kLanes;
    for (int k = 0; short_ones && k < kVectorsAtOnce; ++k) short_ones = runs[i + k].count == 1;
    if (short_ones) {
      decay_together(rule, runs + i, dim, end);
      i += kVectorsAtOnce;
    } else {
      decay_run(rule, runs[i++], dim, end);
    }
  }
}

template <typename Weight>
DLRM_INLINE void multiply(Weight values, float factor, int64_t count) {
  for_each_vector(count, [&](int64_t i, auto part) DLRM_ALWAYS_INLINE {
    store(values + i, load(values + i, part) * broadcast(factor), part);
  });
}

// The product of all steps at once, from sums of logarithms.
template <typename Weight>
void decay_by_product(const SgdDecay<Weight>& rule, const LateRows* runs, int64_t count,
                      int64_t dim, int64_t end) {
  for (const LateRows* run = runs; run < runs + count; ++run) {
    const double before = run->begin == 0 ? 0 : rule.steps[run->begin - 1];
    const double factor = std::exp(rule.steps[end - 1] - before);
    multiply(rule.weight + run->row * dim, static_cast<float>(factor), run->count * dim);
  }
}

template <typename Weight>
DLRM_INLINE float greatest_size(Weight values, int64_t count) {
  Vec greatest = zero();
  for_each_vector(count, [&](int64_t i, auto part) DLRM_ALWAYS_INLINE {
    const Vec value = load(values + i, part);
    const Vec size = value < 0 ? -value : value;
    greatest = size > greatest ? size : greatest;
  });
  float lanes[kLanes];
  store(lanes, greatest);
  return *std::max_element(lanes, lanes + kLanes);
}

// All elements of a row shrink by the same factor: a step is a few operations, whatever dim is.
template <typename Weight>
void decay_row_wise(const RowWiseAdagradDecay<Weight>& rule, const LateRows* runs, int64_t count,
                    int64_t dim, int64_t end) {
  for (const LateRows* run = runs; run < runs + count; ++run) {
    for (int64_t row = run->row; row < run->row + run->count; ++row) {
      const Weight weight = rule.weight + row * dim;
      const float greatest = greatest_size(weight, dim);
      if (greatest == 0) continue;
      Vec sum = zero();  // of the squares of the values over the greatest, which do not underflow
      for_each_vector(dim, [&](int64_t i, auto part) DLRM_ALWAYS_INLINE {
        const Vec value = load(weight + i, part) * broadcast(1 / greatest);
        sum += value * value;
      });
      const double size = double{rule.l2} * greatest;
      const double squares = size * size * sum_lanes(sum) / static_cast<double>(dim);
      double state = rule.state_sum[row], factor = 1;
      for (int64_t step = run->begin; step < end; ++step) {
        state += squares * factor * factor;
        factor -= factor * rule.steps[step] * rule.l2 / (std::sqrt(state) + rule.eps);
      }
      rule.state_sum[row] = static_cast<float>(state);
      multiply(weight, static_cast<float>(factor), dim);
    }
  }
}
