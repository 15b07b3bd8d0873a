#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "network.h"

namespace dlrm {
namespace {

// Samples of one partial sum: set by the shape alone, so that the loss is the same at any thread
// count.
constexpr int64_t kSamplesOfASum = 1024;

}  // namespace

// Returns the sum of the samples' binary cross-entropies divided by `divisor`, and its gradient.
std::tuple<Tensor, Tensor> logistic_loss(const Tensor& logits_, const Tensor& labels_,
                                         double divisor) {
  DLRM_CHECK(logits_.dim() == 1 && labels_.dim() == 1 && logits_.size(0) == labels_.size(0) &&
                 logits_.scalar_type() == ScalarType::Float &&
                 labels_.scalar_type() == ScalarType::Float && labels_.is_cpu(),
             "logistic_loss: expected logits and labels [batch] Float, got ", shape_of(logits_),
             " ", dtype_of(logits_), " and ", shape_of(labels_), " ", dtype_of(labels_));
  const Tensor logits = as_contiguous(logits_);
  const Tensor labels = as_contiguous(labels_);
  const int64_t count = logits.size(0);
  Tensor grad = allocate(logits, {count});
  Tensor loss = allocate(logits, {});
  const auto* x = logits.const_data_ptr<float>();
  const auto* y = labels.const_data_ptr<float>();
  auto* out = grad.mutable_data_ptr<float>();
  const int64_t parts = (count + kSamplesOfASum - 1) / kSamplesOfASum;
  std::vector<double> sums(parts, 0.0);
  const auto inverse = static_cast<float>(1 / divisor);
  torch::stable::parallel_for(0, parts, 4, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t last = std::min(count, (part + 1) * kSamplesOfASum);
      for (int64_t i = part * kSamplesOfASum; i < last; ++i) {
        const float small = std::exp(-std::abs(x[i]));
        sums[part] += std::max(x[i], 0.0f) - x[i] * y[i] + std::log1p(small);
        const float click = (x[i] >= 0 ? 1.0f : small) / (1.0f + small);
        out[i] = (click - y[i]) * inverse;
      }
    }
  });
  double total = 0;
  for (double sum : sums) total += sum;
  *loss.mutable_data_ptr<float>() = static_cast<float>(total / divisor);
  return {loss, grad};
}

}  // namespace dlrm

STABLE_TORCH_LIBRARY_IMPL(dlrm, CPU, m) {
  m.impl("logistic_loss", TORCH_BOX(&dlrm::logistic_loss));
}
