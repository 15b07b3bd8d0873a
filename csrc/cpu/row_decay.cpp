#include "../row_decay.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "isa.h"
#include "split_floats.h"

namespace dlrm {
namespace {

// Neighboring rows that have missed the same steps: from `begin` on.
struct LateRows {
  int64_t row, count;
  int32_t begin;
};

// Where the weight (float* or SplitFloats) and its state are, and the numbers of each step.
template <typename Weight>
struct SgdDecay {
  Weight weight;
  const double* steps;  // the sum of log(1 - lr * l2) over the steps up to each one
};
template <typename Weight>
struct AdagradDecay {
  Weight weight;
  float* state_sum;
  const float* steps;  // lr
  float l2, eps;
};
template <typename Weight>
struct RowWiseAdagradDecay {
  Weight weight;
  float* state_sum;
  const float* steps;  // lr
  float l2, eps;
};
template <typename Weight>
struct AdamDecay {
  Weight weight;
  float* exp_avg;
  float* exp_avg_sq;
  const float* steps;                       // step size and eps, as in AdamRule
  float l2, new_of_average, new_of_square;  // 1 - beta1 and 1 - beta2
};

}  // namespace
}  // namespace dlrm

#define DLRM_KERNELS "row_decay_kernels.h"
#include "for_each_isa.h"

namespace dlrm {
namespace {

constexpr int64_t kElementsPerTask = 16384;

// Flushes numbers below 1e-38 to zero within its scope: decaying values end there, and processors
// take a hundred times as long for them.
class FlushToZero {
 public:
#if defined(__x86_64__)
  FlushToZero() { _mm_setcsr(before_ | 0x8040); }  // of results and of operands
  ~FlushToZero() { _mm_setcsr(before_); }

 private:
  const unsigned before_ = _mm_getcsr();
#else
  FlushToZero() {}
#endif
};

// Groups rows that have missed equally many steps, or 255 and more.
void order_by_steps(std::vector<LateRows>& late, std::vector<LateRows>& ordered, int64_t end) {
  const auto bucket = [&](const LateRows& rows) {
    return std::min<int64_t>(end - rows.begin, 255);
  };
  int64_t places[257] = {};
  for (const LateRows& rows : late) ++places[bucket(rows) + 1];
  for (int i = 0; i < 256; ++i) places[i + 1] += places[i];
  ordered.resize(late.size());
  for (const LateRows& rows : late) ordered[places[bucket(rows)]++] = rows;
  late.swap(ordered);
}

// A task applies to its rows the steps that they have missed.
template <typename Rule, typename Kernel, typename FindLate>
void decay_late(const RowDecayInputs& inputs, const Rule& rule, const Kernel& kernel,
                const FindLate& find_late) {
  const int64_t per_task = std::max<int64_t>(1, kElementsPerTask / inputs.dim);
  torch::stable::parallel_for(0, inputs.count, per_task, [&](int64_t first, int64_t last) {
    const FlushToZero flush;
    std::vector<LateRows> late, ordered;
    for (int64_t begin = first; begin < last; begin += per_task) {
      late.clear();
      find_late(begin, std::min(begin + per_task, last), late);
      order_by_steps(late, ordered, inputs.num_steps);
      kernel(rule, late.data(), static_cast<int64_t>(late.size()), inputs.dim, inputs.num_steps);
    }
  });
}

// Of a batch's rows, a task owns those that it is first to mark as up to date. Rows outside the
// weight are left to the lookup, which reports them.
template <typename Rule, typename Kernel>
void decay(const RowDecayInputs& inputs, const Rule& rule, const Kernel& kernel, Tensor& done_) {
  if (inputs.num_steps == 0) return;
  auto* done = done_.mutable_data_ptr<int32_t>();
  const auto end = static_cast<int32_t>(inputs.num_steps);
  if (!inputs.rows) {
    return decay_late(inputs, rule, kernel,
                      [&](int64_t row, int64_t last, std::vector<LateRows>& late) {
                        for (int64_t next; row < last; row = next) {
                          const int32_t begin = done[row];
                          for (next = row; next < last && done[next] == begin;) done[next++] = end;
                          if (begin < end) late.push_back({row, next - row, begin});
                        }
                      });
  }
  const int64_t* rows = inputs.rows->const_data_ptr<int64_t>();
  decay_late(inputs, rule, kernel, [&](int64_t i, int64_t last, std::vector<LateRows>& late) {
    for (; i < last; ++i) {
      const int64_t row = rows[i];
      if (row < 0 || row >= inputs.total_rows) continue;
      int32_t begin = __atomic_load_n(done + row, __ATOMIC_RELAXED);
      if (begin < end && __atomic_compare_exchange_n(done + row, &begin, end, false,
                                                     __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        late.push_back({row, 1, begin});
      }
    }
  });
}

void row_sgd_decay(Tensor weight, Tensor done, const Tensor& steps, std::optional<Tensor> rows,
                   std::optional<Tensor> low) {
  const RowDecayInputs inputs("row_sgd_decay_", weight, low, done, steps, ScalarType::Double, 1,
                              rows);
  dispatch_weight(weight, low, [&]<typename Weight>(Weight data) {
    const SgdDecay<Weight> rule{data, inputs.steps.const_data_ptr<double>()};
    decay(inputs, rule, DLRM_KERNEL(decay_by_product<Weight>), done);
  });
}

void row_adagrad_decay(Tensor weight, Tensor state_sum, Tensor done, const Tensor& steps,
                       std::optional<Tensor> rows, double l2, double eps,
                       std::optional<Tensor> low) {
  const RowDecayInputs inputs("row_adagrad_decay_", weight, low, done, steps, ScalarType::Float, 1,
                              rows);
  inputs.check_state("state_sum", state_sum, inputs.dim);
  dispatch_weight(weight, low, [&]<typename Weight>(Weight data) {
    const AdagradDecay<Weight> rule{data, state_sum.mutable_data_ptr<float>(),
                                    inputs.steps.const_data_ptr<float>(), static_cast<float>(l2),
                                    static_cast<float>(eps)};
    decay(inputs, rule, DLRM_KERNEL(decay_rows<AdagradDecay<Weight>>), done);
  });
}

void row_wise_adagrad_decay(Tensor weight, Tensor state_sum, Tensor done, const Tensor& steps,
                            std::optional<Tensor> rows, double l2, double eps,
                            std::optional<Tensor> low) {
  const RowDecayInputs inputs("row_wise_adagrad_decay_", weight, low, done, steps,
                              ScalarType::Float, 1, rows);
  inputs.check_state("state_sum", state_sum, 0);
  dispatch_weight(weight, low, [&]<typename Weight>(Weight data) {
    const RowWiseAdagradDecay<Weight> rule{data, state_sum.mutable_data_ptr<float>(),
                                           inputs.steps.const_data_ptr<float>(),
                                           static_cast<float>(l2), static_cast<float>(eps)};
    decay(inputs, rule, DLRM_KERNEL(decay_row_wise<Weight>), done);
  });
}

void row_adam_decay(Tensor weight, Tensor exp_avg, Tensor exp_avg_sq, Tensor done,
                    const Tensor& steps, std::optional<Tensor> rows, double l2, double beta1,
                    double beta2, std::optional<Tensor> low) {
  const RowDecayInputs inputs("row_adam_decay_", weight, low, done, steps, ScalarType::Float, 2,
                              rows);
  inputs.check_state("exp_avg", exp_avg, inputs.dim);
  inputs.check_state("exp_avg_sq", exp_avg_sq, inputs.dim);
  dispatch_weight(weight, low, [&]<typename Weight>(Weight data) {
    const AdamDecay<Weight> rule{data,
                                 exp_avg.mutable_data_ptr<float>(),
                                 exp_avg_sq.mutable_data_ptr<float>(),
                                 inputs.steps.const_data_ptr<float>(),
                                 static_cast<float>(l2),
                                 static_cast<float>(1 - beta1),
                                 static_cast<float>(1 - beta2)};
    decay(inputs, rule, DLRM_KERNEL(decay_rows<AdamDecay<Weight>>), done);
  });
}

}  // namespace
}  // namespace dlrm

STABLE_TORCH_LIBRARY_IMPL(dlrm, CPU, m) {
  m.impl("row_sgd_decay_", TORCH_BOX(&dlrm::row_sgd_decay));
  m.impl("row_adagrad_decay_", TORCH_BOX(&dlrm::row_adagrad_decay));
  m.impl("row_wise_adagrad_decay_", TORCH_BOX(&dlrm::row_wise_adagrad_decay));
  m.impl("row_adam_decay_", TORCH_BOX(&dlrm::row_adam_decay));
}
