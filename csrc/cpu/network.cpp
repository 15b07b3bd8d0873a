// A network from its numerical fields to its logits, or to the gradients of its loss, in one call.
// The parts are called as they are, so the values are theirs. After a large product the caches hold
// nothing of Python's and autograd's, so each node that a step does without is worth 50 to 100 us.
#include "network.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <functional>

namespace dlrm {
namespace {

Tensor network(const Tensor& numerical, const Tensor& embeddings_,
               std::vector<Tensor> bottom_weights, std::vector<Tensor> bottom_biases,
               std::vector<Tensor> top_weights, std::vector<Tensor> top_biases,
               const Tensor& logit_weight, const Tensor& logit_bias, std::optional<Tensor> ids,
               std::optional<Tensor> table_offsets, std::optional<ScalarType> dtype) {
  DLRM_CHECK(ids.has_value() == table_offsets.has_value(),
             "network: expected ids and table_offsets, or neither");
  const Tensor embeddings =
      ids ? joint_embedding(embeddings_, *ids, *table_offsets, dtype) : embeddings_;
  const auto [dense, no_kept] =
      mlp(numerical, bottom_weights, bottom_biases, std::nullopt, std::nullopt, false);
  const auto [logits, none] = mlp(dot_interaction(dense, embeddings), top_weights, top_biases,
                                  logit_weight, logit_bias, false);
  return logits;
}

// logits + added
Tensor sum_of(const Tensor& logits, const Tensor& added_) {
  DLRM_CHECK(added_.dim() == 1 && added_.size(0) == logits.size(0) &&
                 added_.scalar_type() == ScalarType::Float && added_.is_cpu(),
             "network_gradients: expected added logits ", shape_of(logits),
             " Float on the CPU, got ", shape_of(added_), " ", dtype_of(added_));
  const Tensor added = as_contiguous(added_);
  Tensor sum = allocate(logits, {logits.size(0)});
  std::transform(logits.const_data_ptr<float>(), logits.const_data_ptr<float>() + logits.numel(),
                 added.const_data_ptr<float>(), sum.mutable_data_ptr<float>(), std::plus<>());
  return sum;
}

std::vector<Tensor> network_gradients(const Tensor& numerical, const Tensor& embeddings,
                                      std::vector<Tensor> bottom_weights,
                                      std::vector<Tensor> bottom_biases,
                                      std::vector<Tensor> top_weights,
                                      std::vector<Tensor> top_biases, const Tensor& logit_weight,
                                      const Tensor& logit_bias, std::optional<Tensor> added_logits,
                                      const Tensor& labels, double divisor) {
  const ScalarType dtype = embeddings.scalar_type();
  const auto [dense, bottom_kept] =
      mlp(numerical, bottom_weights, bottom_biases, std::nullopt, std::nullopt, true);
  const auto [logits, top_kept] = mlp(dot_interaction(dense, embeddings), top_weights, top_biases,
                                      logit_weight, logit_bias, true);
  const auto [loss, grad] =
      logistic_loss(added_logits ? sum_of(logits, *added_logits) : logits, labels, divisor);
  const auto top =
      mlp_backward(grad, logits, top_kept, top_weights, logit_weight, logit_bias, dtype, true);
  const auto [grad_dense, grad_embeddings] = dot_interaction_backward(top[0], dense, embeddings);
  const auto bottom = mlp_backward(grad_dense, dense, bottom_kept, bottom_weights, std::nullopt,
                                   std::nullopt, dtype, false);
  std::vector<Tensor> found{loss, grad, grad_embeddings};
  found.insert(found.end(), bottom.begin() + 1, bottom.end());
  found.insert(found.end(), top.begin() + 1, top.end());
  return found;
}

}  // namespace
}  // namespace dlrm

STABLE_TORCH_LIBRARY_IMPL(dlrm, CPU, m) {
  m.impl("network", TORCH_BOX(&dlrm::network));
  m.impl("network_gradients", TORCH_BOX(&dlrm::network_gradients));
}
