#include "../relu_bias_backward.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "isa.h"

#define DLRM_KERNELS "relu_bias_backward_kernels.h"
#include "for_each_isa.h"

namespace dlrm {
namespace {

// Rows of one partial sum of the bias's gradient: set by the shape alone, so that the sums are the
// same at any thread count.
constexpr int64_t kRowsOfASum = 256;

std::tuple<Tensor, Tensor> relu_bias_backward(const Tensor& grad, const Tensor& output) {
  const ReluBiasBackwardInputs inputs(grad, output);
  const int64_t batch = inputs.batch, width = inputs.width;
  Tensor grad_input = allocate(inputs.grad, {batch, width});
  Tensor grad_bias = allocate(inputs.grad, {width}, ScalarType::Float);
  float* bias_data = grad_bias.mutable_data_ptr<float>();
  const int64_t num_sums = (batch + kRowsOfASum - 1) / kRowsOfASum;
  const Scratch<float> sums(num_sums * width);
  dispatch_floating(grad.scalar_type(), [&]<typename scalar_t>() {
    const auto* grad_data = inputs.grad.const_data_ptr<scalar_t>();
    const auto* output_data = inputs.output.const_data_ptr<scalar_t>();
    auto* input_data = grad_input.mutable_data_ptr<scalar_t>();
    const auto backward = DLRM_KERNEL(relu_bias_backward_rows<scalar_t>);
    torch::stable::parallel_for(0, num_sums, 1, [&](int64_t begin, int64_t end) {
      for (int64_t sum = begin; sum < end; ++sum) {
        backward(grad_data, output_data, input_data, sums.get() + sum * width, width,
                 sum * kRowsOfASum, std::min(batch, (sum + 1) * kRowsOfASum));
      }
    });
  });
  std::fill_n(bias_data, width, 0.0f);
  for (int64_t sum = 0; sum < num_sums; ++sum) {
    for (int64_t column = 0; column < width; ++column) {
      bias_data[column] += sums.get()[sum * width + column];
    }
  }
  return {grad_input, grad_bias};
}

}  // namespace
}  // namespace dlrm

STABLE_TORCH_LIBRARY_IMPL(dlrm, CPU, m) {
  m.impl("relu_bias_backward", TORCH_BOX(&dlrm::relu_bias_backward));
}
