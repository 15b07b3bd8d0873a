#include "../row_update.h"

#include <torch/csrc/stable/library.h>

#include <cmath>

#include "isa.h"
#include "rows.h"
#include "sort_rows.h"
#include "tasks.h"

#define DLRM_KERNELS "row_update_kernels.h"
#include "for_each_isa.h"

namespace dlrm {
namespace {

constexpr int64_t kElementsPerTask = 16384;

// Applies `rule` to every touched row.
template <typename Rule, typename Weight>
void update(const RowUpdateInputs& inputs, const Rule& rule, const Rows<Weight>& rows, float rate,
            float inverse_scale, float l2) {
  const int64_t* numbers = inputs.rows.const_data_ptr<int64_t>();
  const int64_t shares = std::clamp<int64_t>(inputs.count * inputs.dim / kElementsPerTask, 1,
                                             torch::stable::get_num_threads());
  const auto bounds = share_rows(numbers, inputs.count, inputs.total_rows, shares);
  FirstBad bad;
  dispatch_floating(inputs.grad.scalar_type(), [&]<typename grad_t>() {
    const auto* grad = inputs.grad.const_data_ptr<grad_t>();
    const auto update_rows = DLRM_KERNEL(update_rows<grad_t, Rule, Weight>);
    torch::stable::parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) {
      const Scratch<float> sum(inputs.dim);
      for (int64_t share = begin; share < end; ++share) {
        const SortedRows pairs(numbers, inputs.count, inputs.total_rows, bounds[share],
                               bounds[share + 1]);
        if (pairs.bad_position() >= 0) return bad.report(pairs.bad_position());
        update_rows(rule, rows, pairs, grad, inputs.dim, rate, inverse_scale, l2, sum.get());
      }
    });
  });
  if (bad.any()) {
    fail(inputs.name, ": row ", numbers[bad.position()], " at position ", bad.position(),
         ": expected 0 <= row < ", inputs.total_rows);
  }
}

void row_update(int64_t number, Tensor weight, std::vector<Tensor> states, const Tensor& rows,
                const Tensor& grad, const Tensor& lr, std::optional<Tensor> step,
                std::vector<double> constants, double l2, std::optional<Tensor> low,
                TableSizes table_sizes, std::optional<Tensor> grad_scale,
                std::optional<Tensor> found_inf) {
  const RowUpdateInputs inputs(weight, low, rows, grad, table_sizes);
  const auto value = [&](const char* what, const std::optional<Tensor>& given, double otherwise) {
    return given ? scalar(inputs.name, what, *given) : otherwise;
  };
  double rate = value("lr", lr, 0);
  const double scale = value("grad_scale", grad_scale, 1);
  const std::vector<double> exact = constants;
  for (double& constant : constants) constant = static_cast<float>(constant);
  dispatch_rule(inputs.name, number, constants, [&]<typename Rule>(const Rule& rule) {
    inputs.check_states(rule, states);
    if constexpr (Rule::kCountsSteps) {
      const double steps = value("step", step, 0);
      DLRM_CHECK(steps >= 1, inputs.name, ": expected step >= 1, the number of this update, got ",
                 steps);
      rate = rate * std::sqrt(1 - std::pow(exact[1], steps)) / (1 - std::pow(exact[0], steps));
    }
    if (value("found_inf", found_inf, 0) != 0) return;
    dispatch_rows(weight, low, states, [&](const auto& own) {
      update(inputs, rule, own, static_cast<float>(rate), static_cast<float>(1 / scale),
             static_cast<float>(l2));
    });
  });
}

}  // namespace
}  // namespace dlrm

STABLE_TORCH_LIBRARY_IMPL(dlrm, CPU, m) { m.impl("row_update_", TORCH_BOX(&dlrm::row_update)); }
