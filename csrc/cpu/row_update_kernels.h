// Kernels of the row updates for one instruction set; see for_each_isa.h.
//
// A task owns a range of rows, each from its first pair to its last: it reads each gradient once
// and reads and writes each touched row once, whatever the optimizer.

constexpr int64_t kUpdateAheadBytes = 2048;

#include "row_vectors.h"

// The sum of one row's gradients has room for whole vectors, with zeros behind its end: the first
// elements of a vector, stored one by one, could not be read back at once.
template <typename grad_t>
DLRM_INLINE void copy_gradient(const grad_t* from, float* sum, int64_t dim) {
  for_each_vector(
      dim, [&](int64_t i, auto part) DLRM_ALWAYS_INLINE { store(sum + i, load(from + i, part)); });
}
template <typename grad_t>
DLRM_INLINE void add_gradient(const grad_t* from, float* sum, int64_t dim) {
  for_each_vector(dim, [&](int64_t i, auto part) DLRM_ALWAYS_INLINE {
    store(sum + i, load(sum + i) + load(from + i, part));
  });
}
DLRM_INLINE void scale_gradient(float factor, float* sum, int64_t dim) {
  for (int64_t i = 0; i < dim; i += kLanes) store(sum + i, load(sum + i) * broadcast(factor));
}

// Adds the gradient of l2 / 2 * (the sum of the row's squares).
template <typename Weight>
DLRM_INLINE void add_l2(float l2, Weight row, float* sum, int64_t dim) {
  const Vec factor = broadcast(l2);
  for_each_vector(dim, [&](int64_t i, auto part) DLRM_ALWAYS_INLINE {
    store(sum + i, load(sum + i) + factor * load(row + i, part));
  });
}

template <typename Weight>
DLRM_INLINE void update_row(const SgdRule<Weight>& rule, int64_t row, const float* grad,
                            int64_t dim) {
  const Weight weight = rule.weight + row * dim;
  const Vec lr = broadcast(rule.lr);
  for_each_vector(dim, [&](int64_t i, auto part) DLRM_ALWAYS_INLINE {
    store(weight + i, load(weight + i, part) - lr * load(grad + i), part);
  });
}

template <typename Weight>
DLRM_INLINE void update_row(const AdagradRule<Weight>& rule, int64_t row, const float* grad,
                            int64_t dim) {
  const Weight weight = rule.weight + row * dim;
  float* state = rule.state_sum + row * dim;
  const Vec lr = broadcast(rule.lr), eps = broadcast(rule.eps);
  for_each_vector(dim, [&](int64_t i, auto part) DLRM_ALWAYS_INLINE {
    const Vec gradient = load(grad + i);
    const Vec sum = load(state + i, part) + gradient * gradient;
    store(state + i, sum, part);
    store(weight + i, load(weight + i, part) - lr * gradient / (square_root(sum) + eps), part);
  });
}

template <typename Weight>
DLRM_INLINE void update_row(const RowWiseAdagradRule<Weight>& rule, int64_t row, const float* grad,
                            int64_t dim) {
  Vec squares = zero();
  for (int64_t i = 0; i < dim; i += kLanes) squares += load(grad + i) * load(grad + i);
  const float state = rule.state_sum[row] + sum_lanes(squares) / static_cast<float>(dim);
  rule.state_sum[row] = state;
  const float rate = rule.lr / (std::sqrt(state) + rule.eps);
  update_row(SgdRule<Weight>{rule.weight, rate}, row, grad, dim);
}

template <typename Weight>
DLRM_INLINE void update_row(const AdamRule<Weight>& rule, int64_t row, const float* grad,
                            int64_t dim) {
  const Weight weight = rule.weight + row * dim;
  float* exp_avg = rule.exp_avg + row * dim;
  float* exp_avg_sq = rule.exp_avg_sq + row * dim;
  const Vec step_size = broadcast(rule.step_size), eps = broadcast(rule.eps);
  const Vec new_of_average = broadcast(1 - rule.beta1), new_of_square = broadcast(1 - rule.beta2);
  for_each_vector(dim, [&](int64_t i, auto part) DLRM_ALWAYS_INLINE {
    const Vec gradient = load(grad + i);
    Vec average = load(exp_avg + i, part), square = load(exp_avg_sq + i, part);
    average += new_of_average * (gradient - average);
    square += new_of_square * (gradient * gradient - square);
    store(exp_avg + i, average, part);
    store(exp_avg_sq + i, square, part);
    const Vec change = step_size * average / (square_root(square) + eps);
    store(weight + i, load(weight + i, part) - change, part);
  });
}

DLRM_INLINE void prefetch_row(const float* data, int64_t row, int64_t columns) {
  prefetch_bytes(reinterpret_cast<uintptr_t>(data + row * columns), columns * sizeof(float));
}
DLRM_INLINE void prefetch_row(SplitFloats data, int64_t row, int64_t columns) {
  prefetch_bytes(reinterpret_cast<uintptr_t>(data.high + row * columns),
                 columns * sizeof(BFloat16));
  prefetch_bytes(reinterpret_cast<uintptr_t>(data.low + row * columns), columns * sizeof(int16_t));
}
template <typename Weight>
DLRM_INLINE void prefetch_rule(const SgdRule<Weight>& rule, int64_t row, int64_t dim) {
  prefetch_row(rule.weight, row, dim);
}
template <typename Weight>
DLRM_INLINE void prefetch_rule(const AdagradRule<Weight>& rule, int64_t row, int64_t dim) {
  prefetch_row(rule.weight, row, dim);
  prefetch_row(rule.state_sum, row, dim);
}
template <typename Weight>
DLRM_INLINE void prefetch_rule(const RowWiseAdagradRule<Weight>& rule, int64_t row, int64_t dim) {
  prefetch_row(rule.weight, row, dim);
  prefetch_row(rule.state_sum, row, 1);
}
template <typename Weight>
DLRM_INLINE void prefetch_rule(const AdamRule<Weight>& rule, int64_t row, int64_t dim) {
  prefetch_row(rule.weight, row, dim);
  prefetch_row(rule.exp_avg, row, dim);
  prefetch_row(rule.exp_avg_sq, row, dim);
}

// `sum` holds dim floats, and zeros up to whole vectors.
template <typename grad_t, typename Rule>
void update_rows(const Rule& rule, const SortedRows& pairs, const grad_t* grad, int64_t dim,
                 float inverse_scale, float l2, float* sum) {
  const int64_t ahead = std::clamp<int64_t>(kUpdateAheadBytes / (dim * sizeof(grad_t)), 2, 32);
  const int64_t end = pairs.size();
  int64_t next = 0;
  for (int64_t i = 0; i < end;) {
    const int64_t row = pairs.row(i);
    copy_gradient(grad + pairs.position(i) * dim, sum, dim);
    for (;;) {
      for (; next < std::min(i + ahead, end); ++next) {
        prefetch_bytes(reinterpret_cast<uintptr_t>(grad + pairs.position(next) * dim),
                       dim * sizeof(grad_t));
        prefetch_rule(rule, pairs.row(next), dim);
      }
      if (++i == end || pairs.row(i) != row) break;
      add_gradient(grad + pairs.position(i) * dim, sum, dim);
    }
    if (inverse_scale != 1) scale_gradient(inverse_scale, sum, dim);
    if (l2 != 0) add_l2(l2, rule.weight + row * dim, sum, dim);
    update_row(rule, row, sum, dim);
  }
}
