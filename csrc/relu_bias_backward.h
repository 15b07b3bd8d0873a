// Sizes and checks of one relu_bias_backward call, for every backend.
#pragma once

#include "tensors.h"

namespace dlrm {

struct ReluBiasBackwardInputs {
  int64_t batch;
  int64_t width;
  Tensor grad;    // [batch, width], contiguous
  Tensor output;  // [batch, width], contiguous

  ReluBiasBackwardInputs(const Tensor& grad_, const Tensor& output_) {
    DLRM_CHECK(grad_.dim() == 2 && output_.dim() == 2 && grad_.size(0) == output_.size(0) &&
                   grad_.size(1) == output_.size(1),
               "relu_bias_backward: expected grad and output [batch, width], got grad ",
               shape_of(grad_), " and output ", shape_of(output_));
    DLRM_CHECK(
        is_floating(grad_.scalar_type()) && grad_.scalar_type() == output_.scalar_type(),
        "relu_bias_backward: expected grad and output of one dtype (Float, BFloat16 or Half), got"
        " grad ",
        dtype_of(grad_), " and output ", dtype_of(output_));
    DLRM_CHECK(grad_.device() == output_.device(),
               "relu_bias_backward: grad and output are on different devices");
    batch = grad_.size(0);
    width = grad_.size(1);
    grad = as_contiguous(grad_);
    output = as_contiguous(output_);
  }
};

}  // namespace dlrm
