// Sizes and checks of one call of mlp or its gradient.
#pragma once

#include <vector>

#include "tensors.h"

namespace dlrm {

struct MlpInputs {
  int64_t batch;
  Tensor inputs;  // [batch, inputs], contiguous
  ScalarType parameters;
  std::vector<Tensor> weights, biases;  // [outputs, inputs] and [outputs] of each layer, contiguous

  MlpInputs(const Tensor& inputs_, const std::vector<Tensor>& weights_,
            const std::vector<Tensor>& biases_) {
    DLRM_CHECK(inputs_.dim() == 2 && is_floating(inputs_.scalar_type()),
               "mlp: expected inputs [batch, inputs], Float, BFloat16 or Half, got ",
               shape_of(inputs_), " ", dtype_of(inputs_));
    DLRM_CHECK(!weights_.empty() && weights_.size() == biases_.size(),
               "mlp: expected a bias for every weight, got ", weights_.size(), " weights, ",
               biases_.size(), " biases");
    batch = inputs_.size(0);
    inputs = as_contiguous(inputs_);
    parameters = weights_[0].scalar_type();
    int64_t width = inputs_.size(1);
    for (size_t layer = 0; layer < weights_.size(); ++layer) {
      const Tensor &weight = weights_[layer], &bias = biases_[layer];
      DLRM_CHECK(weight.dim() == 2 && weight.size(1) == width && bias.dim() == 1 &&
                     bias.size(0) == weight.size(0),
                 "mlp: layer ", layer, ": expected weight [outputs, ", width,
                 "] and bias [outputs], got weight ", shape_of(weight), " and bias ",
                 shape_of(bias));
      DLRM_CHECK(weight.scalar_type() == parameters && bias.scalar_type() == parameters &&
                     (parameters == ScalarType::Float || parameters == ScalarType::BFloat16),
                 "mlp: layer ", layer,
                 ": expected weight and bias of one dtype, Float or BFloat16, as ",
                 "the other layers', got weight ", dtype_of(weight), " and bias ", dtype_of(bias));
      DLRM_CHECK(weight.device() == inputs_.device() && bias.device() == inputs_.device(),
                 "mlp: layer ", layer, ": weight and bias are on another device than the inputs");
      weights.push_back(as_contiguous(weight));
      biases.push_back(as_contiguous(bias));
      width = weight.size(0);
    }
  }
};

// The layer of one logit behind the last ReLU.
struct LogitLayer {
  Tensor weight, bias;  // [1, inputs] and [1] of Float, contiguous

  LogitLayer(const Tensor& weight_, const Tensor& bias_, int64_t inputs)
      : weight(as_contiguous(weight_)), bias(as_contiguous(bias_)) {
    DLRM_CHECK(weight.dim() == 2 && weight.size(0) == 1 && weight.size(1) == inputs &&
                   bias.numel() == 1 && weight.scalar_type() == ScalarType::Float &&
                   bias.scalar_type() == ScalarType::Float && weight.is_cpu() && bias.is_cpu(),
               "mlp: expected the logit's weight [1, ", inputs, "] and bias [1], Float, got ",
               shape_of(weight), " ", dtype_of(weight), " and ", shape_of(bias), " ",
               dtype_of(bias));
  }
};

}  // namespace dlrm
