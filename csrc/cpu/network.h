// Operators that others call: the parts of a network from its fields to its logits.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "../tensors.h"

namespace dlrm {

Tensor joint_embedding(const Tensor& weight, const Tensor& ids, const Tensor& table_offsets,
                       std::optional<ScalarType> dtype);

Tensor dot_interaction(const Tensor& dense, const Tensor& embeddings);

std::tuple<Tensor, Tensor> dot_interaction_backward(const Tensor& grad, const Tensor& dense,
                                                    const Tensor& embeddings);

// Linear layers, each followed by a ReLU, and then, with `logit_weight` and `logit_bias`, a layer
// of one output without a ReLU, which makes the output [batch] Float. The second result is what the
// gradient needs, with `keeps`; see mlp_layers.h.
std::tuple<Tensor, Tensor> mlp(const Tensor& inputs, std::vector<Tensor> weights,
                               std::vector<Tensor> biases, std::optional<Tensor> logit_weight,
                               std::optional<Tensor> logit_bias, bool keeps);

// The gradients of the inputs, the weights, the biases, and the logit's layer.
std::vector<Tensor> mlp_backward(const Tensor& grad, const Tensor& output, const Tensor& kept,
                                 std::vector<Tensor> weights, std::optional<Tensor> logit_weight,
                                 std::optional<Tensor> logit_bias, ScalarType dtype,
                                 bool needs_inputs);

std::tuple<Tensor, Tensor> logistic_loss(const Tensor& logits, const Tensor& labels,
                                         double divisor);

}  // namespace dlrm
