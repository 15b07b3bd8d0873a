// Kernels of the row updates for one instruction set; see for_each_isa.h.
//
// A task owns a range of rows, each from its first pair to its last: it reads each gradient once
// and reads and writes each touched row once, whatever the optimizer.

constexpr int64_t kUpdateAheadBytes = 2048;

// Adds up one row's gradients in batch order.
template <typename grad_t>
DLRM_INLINE void add_elements(const grad_t* from, float* to, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(to + i, load(to + i) + load(from + i));
  if (i < size)
    store_first(to + i, load_first(to + i, size - i) + load_first(from + i, size - i), size - i);
}

DLRM_INLINE void update_row(const SgdRule& rule, int64_t row, const float* __restrict grad,
                            int64_t dim) {
  float* __restrict weight = rule.weight + row * dim;
  for (int64_t i = 0; i < dim; ++i) weight[i] -= rule.lr * grad[i];
}

DLRM_INLINE void update_row(const AdagradRule& rule, int64_t row, const float* __restrict grad,
                            int64_t dim) {
  float* __restrict weight = rule.weight + row * dim;
  float* __restrict state = rule.state_sum + row * dim;
  for (int64_t i = 0; i < dim; ++i) {
    const float sum = state[i] + grad[i] * grad[i];
    state[i] = sum;
    weight[i] -= rule.lr * grad[i] / (std::sqrt(sum) + rule.eps);
  }
}

DLRM_INLINE void update_row(const RowWiseAdagradRule& rule, int64_t row,
                            const float* __restrict grad, int64_t dim) {
  Vec squares = zero();
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) squares += load(grad + i) * load(grad + i);
  if (i < dim) {
    const Vec last = load_first(grad + i, dim - i);
    squares += last * last;
  }
  const float state = rule.state_sum[row] + sum_lanes(squares) / static_cast<float>(dim);
  rule.state_sum[row] = state;
  const float rate = rule.lr / (std::sqrt(state) + rule.eps);
  float* __restrict weight = rule.weight + row * dim;
  for (i = 0; i < dim; ++i) weight[i] -= rate * grad[i];
}

DLRM_INLINE void update_row(const AdamRule& rule, int64_t row, const float* __restrict grad,
                            int64_t dim) {
  float* __restrict weight = rule.weight + row * dim;
  float* __restrict exp_avg = rule.exp_avg + row * dim;
  float* __restrict exp_avg_sq = rule.exp_avg_sq + row * dim;
  for (int64_t i = 0; i < dim; ++i) {
    const float average = exp_avg[i] + (1 - rule.beta1) * (grad[i] - exp_avg[i]);
    const float square = exp_avg_sq[i] + (1 - rule.beta2) * (grad[i] * grad[i] - exp_avg_sq[i]);
    exp_avg[i] = average;
    exp_avg_sq[i] = square;
    weight[i] -= rule.step_size * average / (std::sqrt(square) + rule.eps);
  }
}

DLRM_INLINE void prefetch_row(const float* data, int64_t row, int64_t columns) {
  prefetch_bytes(reinterpret_cast<uintptr_t>(data + row * columns), columns * sizeof(float));
}
DLRM_INLINE void prefetch_rule(const SgdRule& rule, int64_t row, int64_t dim) {
  prefetch_row(rule.weight, row, dim);
}
DLRM_INLINE void prefetch_rule(const AdagradRule& rule, int64_t row, int64_t dim) {
  prefetch_row(rule.weight, row, dim);
  prefetch_row(rule.state_sum, row, dim);
}
DLRM_INLINE void prefetch_rule(const RowWiseAdagradRule& rule, int64_t row, int64_t dim) {
  prefetch_row(rule.weight, row, dim);
  prefetch_row(rule.state_sum, row, 1);
}
DLRM_INLINE void prefetch_rule(const AdamRule& rule, int64_t row, int64_t dim) {
  prefetch_row(rule.weight, row, dim);
  prefetch_row(rule.exp_avg, row, dim);
  prefetch_row(rule.exp_avg_sq, row, dim);
}

// `sum` holds dim floats.
template <typename grad_t, typename Rule>
void update_rows(const Rule& rule, const SortedRows& pairs, const grad_t* grad, int64_t dim,
                 float inverse_scale, float* sum) {
  const int64_t ahead = std::clamp<int64_t>(kUpdateAheadBytes / (dim * sizeof(grad_t)), 2, 32);
  const int64_t end = pairs.size();
  int64_t next = 0;
  for (int64_t i = 0; i < end;) {
    const int64_t row = pairs.row(i);
    copy_elements(grad + pairs.position(i) * dim, sum, dim);
    for (;;) {
      for (; next < std::min(i + ahead, end); ++next) {
        prefetch_bytes(reinterpret_cast<uintptr_t>(grad + pairs.position(next) * dim),
                       dim * sizeof(grad_t));
        prefetch_rule(rule, pairs.row(next), dim);
      }
      if (++i == end || pairs.row(i) != row) break;
      add_elements(grad + pairs.position(i) * dim, sum, dim);
    }
    if (inverse_scale != 1) {
      for (int64_t k = 0; k < dim; ++k) sum[k] *= inverse_scale;
    }
    update_row(rule, row, sum, dim);
  }
}
