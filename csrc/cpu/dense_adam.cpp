#include <torch/csrc/stable/library.h>

#include <cmath>
#include <optional>
#include <vector>

#include "isa.h"
#include "rows.h"
#include "tasks.h"

namespace dlrm {
namespace {

// The numbers of a step that all weights share.
struct AdamStep {
  float beta1, beta2, weight_decay, inverse_scale;
};

// One weight, its state, and its own numbers: step_size = lr * sqrt(1 - beta2^step) /
// (1 - beta1^step), and eps times that root, as the second moment is not divided by it.
struct DenseAdam {
  float* weight;
  const float* grad;
  float* exp_avg;
  float* exp_avg_sq;
  float step_size, eps;
};

}  // namespace
}  // namespace dlrm

#define DLRM_KERNELS "dense_adam_kernels.h"
#include "for_each_isa.h"

namespace dlrm {
namespace {

constexpr const char* kName = "dense_adam_";
constexpr int64_t kElementsPerTask = 8192;

void check_like(const char* what, size_t index, const Tensor& tensor, const Tensor& weight) {
  DLRM_CHECK(tensor.numel() == weight.numel() && tensor.scalar_type() == ScalarType::Float &&
                 tensor.is_contiguous() && tensor.is_cpu(),
             kName, ": ", what, " ", index, ": expected contiguous Float ", shape_of(weight),
             " as the weight, got ", shape_of(tensor), " ", dtype_of(tensor));
}

void dense_adam(std::vector<Tensor> weights, std::vector<Tensor> grads,
                std::vector<Tensor> exp_avgs, std::vector<Tensor> exp_avg_sqs,
                std::vector<Tensor> steps, const Tensor& lr, double beta1, double beta2, double eps,
                double weight_decay, std::optional<Tensor> grad_scale,
                std::optional<Tensor> found_inf) {
  const size_t count = weights.size();
  DLRM_CHECK(grads.size() == count && exp_avgs.size() == count && exp_avg_sqs.size() == count &&
                 steps.size() == count,
             kName, ": expected as many gradients and states as weights, ", count, ", got ",
             grads.size(), ", ", exp_avgs.size(), ", ", exp_avg_sqs.size(), " and ", steps.size());
  if (found_inf && scalar(kName, "found_inf", *found_inf) != 0) return;
  const double scale = grad_scale ? scalar(kName, "grad_scale", *grad_scale) : 1;
  const double rate = scalar(kName, "lr", lr);
  const AdamStep step{static_cast<float>(beta1), static_cast<float>(beta2),
                      static_cast<float>(weight_decay), static_cast<float>(1 / scale)};
  struct Task {
    size_t tensor;
    int64_t begin;
  };
  std::vector<DenseAdam> tensors;
  std::vector<int64_t> sizes;
  std::vector<Task> tasks;
  for (size_t i = 0; i < count; ++i) {
    const Tensor& weight = weights[i];
    check_like("weight", i, weight, weight);
    check_like("gradient", i, grads[i], weight);
    check_like("exp_avg", i, exp_avgs[i], weight);
    check_like("exp_avg_sq", i, exp_avg_sqs[i], weight);
    DLRM_CHECK(
        steps[i].numel() == 1 && steps[i].scalar_type() == ScalarType::Float && steps[i].is_cpu(),
        kName, ": step ", i, ": expected one Float on the CPU, got ", shape_of(steps[i]), " ",
        dtype_of(steps[i]));
  }
  for (size_t i = 0; i < count; ++i) {
    float& done = *steps[i].mutable_data_ptr<float>();
    done += 1;
    const double root = std::sqrt(1 - std::pow(beta2, done));
    const auto step_size = static_cast<float>(rate * root / (1 - std::pow(beta1, done)));
    tensors.push_back({weights[i].mutable_data_ptr<float>(), grads[i].const_data_ptr<float>(),
                       exp_avgs[i].mutable_data_ptr<float>(),
                       exp_avg_sqs[i].mutable_data_ptr<float>(), step_size,
                       static_cast<float>(eps * root)});
    sizes.push_back(weights[i].numel());
    for (int64_t at = 0; at < sizes[i]; at += kElementsPerTask) tasks.push_back({i, at});
  }
  const auto update = DLRM_KERNEL(adam_elements);
  take_tasks(tasks.size(), [&](const auto& take) {
    for (int64_t i = take(); i >= 0; i = take()) {
      const Task& task = tasks[i];
      update(step, tensors[task.tensor], task.begin,
             std::min(sizes[task.tensor], task.begin + kElementsPerTask));
    }
  });
}

}  // namespace
}  // namespace dlrm

STABLE_TORCH_LIBRARY_IMPL(dlrm, CPU, m) { m.impl("dense_adam_", TORCH_BOX(&dlrm::dense_adam)); }
