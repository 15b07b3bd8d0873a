// Kernels of the row updates for one instruction set; see for_each_isa.h.
//
// A task owns a range of rows, each from its first pair to its last: it reads each gradient once
// and reads and writes each touched row once, whatever the optimizer.

constexpr int64_t kUpdateAheadBytes = 2048;

#include "row_steps.h"

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

template <typename Rule, typename Weight>
DLRM_INLINE void update_row(const Rule& rule, const Rows<Weight>& rows, int64_t row,
                            const float* grad, int64_t dim, float rate) {
  const int64_t first = row * dim;
  for_each_vector(dim, [&](int64_t i, auto part) DLRM_ALWAYS_INLINE {
    auto held = load_held<Rule>(rows, first + i, part);
    step<true>(rule, held, load(grad + i), broadcast(rate), broadcast(rule.eps));
    store_held(rows, first + i, part, held);
  });
}
template <typename Weight>
DLRM_INLINE void update_row(const RowWiseAdagrad& rule, const Rows<Weight>& rows, int64_t row,
                            const float* grad, int64_t dim, float rate) {
  Vec squares = zero();
  for (int64_t i = 0; i < dim; i += kLanes) squares += load(grad + i) * load(grad + i);
  const float state = rows.states[0][row] + sum_lanes(squares) / static_cast<float>(dim);
  rows.states[0][row] = state;
  update_row(Sgd(), rows, row, grad, dim, rate / (std::sqrt(state) + rule.eps));
}

DLRM_INLINE void prefetch_row(const float* data, int64_t row, int64_t columns) {
  prefetch_bytes(reinterpret_cast<uintptr_t>(data + row * columns), columns * sizeof(float));
}
DLRM_INLINE void prefetch_row(SplitFloats data, int64_t row, int64_t columns) {
  prefetch_bytes(reinterpret_cast<uintptr_t>(data.high + row * columns),
                 columns * sizeof(BFloat16));
  prefetch_bytes(reinterpret_cast<uintptr_t>(data.low + row * columns), columns * sizeof(int16_t));
}
// `sum` holds dim floats, and zeros up to whole vectors. Rule and rows are copies, which stores
// cannot change, so that their members stay in registers.
template <typename grad_t, typename Rule, typename Weight>
void update_rows(const Rule rule, const Rows<Weight> rows, const SortedRows& pairs,
                 const grad_t* grad, int64_t dim, float rate, float inverse_scale, float l2,
                 float* sum) {
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
        prefetch_row(rows.weight, pairs.row(next), dim);
        for (size_t state = 0; state < Rule::kStates.size(); ++state) {
          prefetch_row(rows.states[state], pairs.row(next), Rule::kRowWise ? 1 : dim);
        }
      }
      if (++i == end || pairs.row(i) != row) break;
      add_gradient(grad + pairs.position(i) * dim, sum, dim);
    }
    if (inverse_scale != 1) scale_gradient(inverse_scale, sum, dim);
    if (l2 != 0) add_l2(l2, rows.weight + row * dim, sum, dim);
    update_row(rule, rows, row, sum, dim, rate);
  }
}
