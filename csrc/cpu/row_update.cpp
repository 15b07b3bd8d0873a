#include "../row_update.h"

#include <torch/csrc/stable/library.h>

#include <cmath>

#include "first_bad.h"
#include "isa.h"
#include "scalar.h"
#include "sort_rows.h"
#include "split_floats.h"

namespace dlrm {
namespace {

// An update rule: pointers to the weight (float* or SplitFloats) and its state, and the numbers of
// this step.
template <typename Weight>
struct SgdRule {
  Weight weight;
  float lr;
};
template <typename Weight>
struct AdagradRule {
  Weight weight;
  float* state_sum;
  float lr, eps;
};
template <typename Weight>
struct RowWiseAdagradRule {
  Weight weight;
  float* state_sum;
  float lr, eps;
};
template <typename Weight>
struct AdamRule {
  Weight weight;
  float* exp_avg;
  float* exp_avg_sq;
  float step_size, beta1, beta2, eps;  // step_size = lr * sqrt(1 - beta2^step) / (1 - beta1^step)
};

}  // namespace
}  // namespace dlrm

#define DLRM_KERNELS "row_update_kernels.h"
#include "for_each_isa.h"

namespace dlrm {
namespace {

constexpr int64_t kElementsPerTask = 16384;

// Applies `rule` to every touched row, unless found_inf reports infinite or NaN gradients.
template <typename Rule>
void update(const RowUpdateInputs& inputs, const Rule& rule, double l2,
            const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf) {
  if (found_inf && scalar(inputs.name, "found_inf", *found_inf) != 0) return;
  const auto inverse_scale =
      static_cast<float>(1 / (grad_scale ? scalar(inputs.name, "grad_scale", *grad_scale) : 1));
  const int64_t* rows = inputs.rows.const_data_ptr<int64_t>();
  const int64_t shares = std::clamp<int64_t>(inputs.count * inputs.dim / kElementsPerTask, 1,
                                             torch::stable::get_num_threads());
  const auto bounds = share_rows(rows, inputs.count, inputs.total_rows, shares);
  FirstBad bad;
  dispatch_floating(inputs.grad.scalar_type(), [&]<typename grad_t>() {
    const auto* grad = inputs.grad.const_data_ptr<grad_t>();
    const auto update_rows = DLRM_KERNEL(update_rows<grad_t, Rule>);
    torch::stable::parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) {
      const Scratch<float> sum(inputs.dim);
      for (int64_t share = begin; share < end; ++share) {
        const SortedRows pairs(rows, inputs.count, inputs.total_rows, bounds[share],
                               bounds[share + 1]);
        if (pairs.bad_position() >= 0) return bad.report(pairs.bad_position());
        update_rows(rule, pairs, grad, inputs.dim, inverse_scale, static_cast<float>(l2),
                    sum.get());
      }
    });
  });
  if (bad.any()) {
    fail(inputs.name, ": row ", rows[bad.position()], " at position ", bad.position(),
         ": expected 0 <= row < ", inputs.total_rows);
  }
}

void row_sgd(Tensor weight, const Tensor& rows, const Tensor& grad, const Tensor& lr, double l2,
             std::optional<Tensor> low, TableSizes table_sizes, std::optional<Tensor> grad_scale,
             std::optional<Tensor> found_inf) {
  const RowUpdateInputs inputs("row_sgd_", weight, low, rows, grad, table_sizes);
  const auto rate = static_cast<float>(scalar(inputs.name, "lr", lr));
  dispatch_weight(weight, low, [&]<typename Weight>(Weight data) {
    update(inputs, SgdRule<Weight>{data, rate}, l2, grad_scale, found_inf);
  });
}

void row_adagrad(Tensor weight, Tensor state_sum, const Tensor& rows, const Tensor& grad,
                 const Tensor& lr, double eps, double l2, std::optional<Tensor> low,
                 TableSizes table_sizes, std::optional<Tensor> grad_scale,
                 std::optional<Tensor> found_inf) {
  const RowUpdateInputs inputs("row_adagrad_", weight, low, rows, grad, table_sizes);
  inputs.check_state("state_sum", state_sum, inputs.dim);
  const auto rate = static_cast<float>(scalar(inputs.name, "lr", lr));
  dispatch_weight(weight, low, [&]<typename Weight>(Weight data) {
    const AdagradRule<Weight> rule{data, state_sum.mutable_data_ptr<float>(), rate,
                                   static_cast<float>(eps)};
    update(inputs, rule, l2, grad_scale, found_inf);
  });
}

void row_wise_adagrad(Tensor weight, Tensor state_sum, const Tensor& rows, const Tensor& grad,
                      const Tensor& lr, double eps, double l2, std::optional<Tensor> low,
                      TableSizes table_sizes, std::optional<Tensor> grad_scale,
                      std::optional<Tensor> found_inf) {
  const RowUpdateInputs inputs("row_wise_adagrad_", weight, low, rows, grad, table_sizes);
  inputs.check_state("state_sum", state_sum, 0);
  const auto rate = static_cast<float>(scalar(inputs.name, "lr", lr));
  dispatch_weight(weight, low, [&]<typename Weight>(Weight data) {
    const RowWiseAdagradRule<Weight> rule{data, state_sum.mutable_data_ptr<float>(), rate,
                                          static_cast<float>(eps)};
    update(inputs, rule, l2, grad_scale, found_inf);
  });
}

void row_adam(Tensor weight, Tensor exp_avg, Tensor exp_avg_sq, const Tensor& rows,
              const Tensor& grad, const Tensor& lr, const Tensor& step, double beta1, double beta2,
              double eps, double l2, std::optional<Tensor> low, TableSizes table_sizes,
              std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf) {
  const RowUpdateInputs inputs("row_adam_", weight, low, rows, grad, table_sizes);
  inputs.check_state("exp_avg", exp_avg, inputs.dim);
  inputs.check_state("exp_avg_sq", exp_avg_sq, inputs.dim);
  const double steps = scalar(inputs.name, "step", step);
  DLRM_CHECK(steps >= 1, "row_adam_: expected step >= 1, the number of this update, got ", steps);
  const double step_size = scalar(inputs.name, "lr", lr) * std::sqrt(1 - std::pow(beta2, steps)) /
                           (1 - std::pow(beta1, steps));
  dispatch_weight(weight, low, [&]<typename Weight>(Weight data) {
    const AdamRule<Weight> rule{data,
                                exp_avg.mutable_data_ptr<float>(),
                                exp_avg_sq.mutable_data_ptr<float>(),
                                static_cast<float>(step_size),
                                static_cast<float>(beta1),
                                static_cast<float>(beta2),
                                static_cast<float>(eps)};
    update(inputs, rule, l2, grad_scale, found_inf);
  });
}

}  // namespace
}  // namespace dlrm

STABLE_TORCH_LIBRARY_IMPL(dlrm, CPU, m) {
  m.impl("row_sgd_", TORCH_BOX(&dlrm::row_sgd));
  m.impl("row_adagrad_", TORCH_BOX(&dlrm::row_adagrad));
  m.impl("row_wise_adagrad_", TORCH_BOX(&dlrm::row_wise_adagrad));
  m.impl("row_adam_", TORCH_BOX(&dlrm::row_adam));
}
