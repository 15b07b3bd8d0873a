// Kernels of the L2 term for one instruction set; see for_each_isa.h.
//
// Vectors of a row are read once, get all the steps that the row has missed, and are written once.

#include "row_steps.h"

constexpr int kVectorsAtOnce = 4;  // whose square roots and divisions overlap

// The elements of vectors get the steps from `begin` on.
template <int kVectors, typename Rule>
DLRM_INLINE void decay(const Rule& rule, const float* numbers, float l2, int64_t begin, int64_t end,
                       Held<Rule> (&held)[kVectors]) {
  constexpr int64_t kColumns = columns_of<Rule>;
  for (int64_t i = begin; i < end; ++i) {
    const Vec rate = broadcast(numbers[kColumns * i]);
    const Vec eps = broadcast(kColumns == 2 ? numbers[kColumns * i + 1] : rule.eps);
    for (int k = 0; k < kVectors; ++k) {
      step<false>(rule, held[k], broadcast(l2) * held[k].weight, rate, eps);
    }
  }
}

template <int kVectors, typename Rule, typename Weight, typename Part>
DLRM_INLINE void decay_vectors(const Rule& rule, const Rows<Weight>& rows, const float* numbers,
                               float l2, int64_t i, Part part, int64_t begin, int64_t end) {
  Held<Rule> held[kVectors];
  for (int k = 0; k < kVectors; ++k) held[k] = load_held<Rule>(rows, i + k * kLanes, part);
  decay(rule, numbers, l2, begin, end, held);
  for (int k = 0; k < kVectors; ++k) store_held(rows, i + k * kLanes, part, held[k]);
}

// The steps of an element do not depend on others of its row, so a run covers elements.
template <typename Rule, typename Weight>
DLRM_INLINE void decay_run(const Rule& rule, const Rows<Weight>& rows, const float* numbers,
                           float l2, const LateRows& run, int64_t dim, int64_t end) {
  const int64_t last = (run.row + run.count) * dim;
  int64_t i = run.row * dim;
  for (; i + kVectorsAtOnce * kLanes <= last; i += kVectorsAtOnce * kLanes) {
    decay_vectors<kVectorsAtOnce>(rule, rows, numbers, l2, i, Whole{}, run.begin, end);
  }
  for (; i + kLanes <= last; i += kLanes) {
    decay_vectors<1>(rule, rows, numbers, l2, i, Whole{}, run.begin, end);
  }
  if (i < last) decay_vectors<1>(rule, rows, numbers, l2, i, First{last - i}, run.begin, end);
}

// One row of each run at a time; they get the steps missed by all of them together.
template <typename Rule, typename Weight>
DLRM_INLINE void decay_together(const Rule& rule, const Rows<Weight>& rows, const float* numbers,
                                float l2, const LateRows* runs, int64_t dim, int64_t end) {
  int64_t together = runs[0].begin;
  for (int k = 1; k < kVectorsAtOnce; ++k) together = std::max<int64_t>(together, runs[k].begin);
  for_each_vector(dim, [&](int64_t i, auto part) DLRM_ALWAYS_INLINE {
    Held<Rule> held[kVectorsAtOnce];
    for (int k = 0; k < kVectorsAtOnce; ++k) {
      Held<Rule> own[1] = {load_held<Rule>(rows, runs[k].row * dim + i, part)};
      decay(rule, numbers, l2, runs[k].begin, together, own);
      held[k] = own[0];
    }
    decay(rule, numbers, l2, together, end, held);
    for (int k = 0; k < kVectorsAtOnce; ++k) {
      store_held(rows, runs[k].row * dim + i, part, held[k]);
    }
  });
}

template <typename Rule, typename Weight>
DLRM_INLINE void decay_late(const Rule& rule, const Rows<Weight>& rows, const float* numbers,
                            float l2, const LateRows* runs, int64_t count, int64_t dim,
                            int64_t end) {
  for (int64_t i = 0; i < count;) {
    bool short_ones = i + kVectorsAtOnce <= count && dim < kVectorsAtOnce * kLanes;
    for (int k = 0; short_ones && k < kVectorsAtOnce; ++k) short_ones = runs[i + k].count == 1;
    if (short_ones) {
      decay_together(rule, rows, numbers, l2, runs + i, dim, end);
      i += kVectorsAtOnce;
    } else {
      decay_run(rule, rows, numbers, l2, runs[i++], dim, end);
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
DLRM_INLINE void decay_late(const Sgd&, const Rows<Weight>& rows, const double* sums, float,
                            const LateRows* runs, int64_t count, int64_t dim, int64_t end) {
  for (const LateRows* run = runs; run < runs + count; ++run) {
    const double before = run->begin == 0 ? 0 : sums[run->begin - 1];
    const double factor = std::exp(sums[end - 1] - before);
    multiply(rows.weight + run->row * dim, static_cast<float>(factor), run->count * dim);
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
DLRM_INLINE void decay_late(const RowWiseAdagrad& rule, const Rows<Weight>& rows,
                            const float* rates, float l2, const LateRows* runs, int64_t count,
                            int64_t dim, int64_t end) {
  for (const LateRows* run = runs; run < runs + count; ++run) {
    for (int64_t row = run->row; row < run->row + run->count; ++row) {
      const Weight weight = rows.weight + row * dim;
      const float greatest = greatest_size(weight, dim);
      if (greatest == 0) continue;
      Vec sum = zero();  // of the squares of the values over the greatest, which do not underflow
      for_each_vector(dim, [&](int64_t i, auto part) DLRM_ALWAYS_INLINE {
        const Vec value = load(weight + i, part) * broadcast(1 / greatest);
        sum += value * value;
      });
      const double size = double{l2} * greatest;
      const double squares = size * size * sum_lanes(sum) / static_cast<double>(dim);
      double state = rows.states[0][row], factor = 1;
      for (int64_t step = run->begin; step < end; ++step) {
        state += squares * factor * factor;
        factor -= factor * rates[step] * l2 / (std::sqrt(state) + rule.eps);
      }
      rows.states[0][row] = static_cast<float>(state);
      multiply(weight, static_cast<float>(factor), dim);
    }
  }
}

template <typename Rule, typename Weight, typename number_t>
void decay_rows(const Rule rule, const Rows<Weight> rows, const number_t* numbers, float l2,
                const LateRows* runs, int64_t count, int64_t dim, int64_t end) {
  decay_late(rule, rows, numbers, l2, runs, count, dim, end);
}
