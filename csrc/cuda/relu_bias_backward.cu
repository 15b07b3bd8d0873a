#include <torch/csrc/stable/library.h>

#include <tuple>

#include "../tensors.h"
#include "vectors.h"

namespace dlrm {
namespace {

// The checked arguments of a call.
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

constexpr int kReluColumns = 32;      // threads of a row of a block
constexpr int kReluRows = 8;          // rows of threads of a block
constexpr int kMaskedAtOnce = 4;      // of a thread, that are on the way
constexpr int64_t kRowsOfASum = 256;  // of one partial sum of the bias's gradient: a constant, so
                                      // that sums are the same on every device

// A block owns kRowsOfASum rows of some columns, and a thread every kReluRows-th of the rows: each
// element of grad and output is read once and each of grad_input written once, 16 bytes a thread
// where rows are aligned, and the block's column sums are written once.
template <typename scalar_t, int kVector>
__global__ void __launch_bounds__(kReluColumns* kReluRows)
    mask_rows(const scalar_t* grad, const scalar_t* output, int64_t batch, int64_t width,
              unsigned strips, scalar_t* grad_input, float* sums) {
  const unsigned strip = blockIdx.x % strips;
  const int64_t sum = blockIdx.x / strips;
  const int64_t column = int64_t{strip * kReluColumns + threadIdx.x} * kVector;
  const int64_t begin = sum * kRowsOfASum + threadIdx.y;
  const int64_t end = column < width ? min((sum + 1) * kRowsOfASum, batch) : 0;
  float own[kVector] = {};
  for (int64_t first = begin; first < end; first += kReluRows * kMaskedAtOnce) {
    Elements<scalar_t, kVector> gradients[kMaskedAtOnce], outputs[kMaskedAtOnce];
    // Without a branch: the compiler would wait for a row there. The last may be read repeatedly.
#pragma unroll
    for (int r = 0; r < kMaskedAtOnce; ++r) {
      const int64_t row = min(first + r * kReluRows, end - 1);
      gradients[r].load(grad + row * width + column);
      outputs[r].load(output + row * width + column);
    }
#pragma unroll
    for (int r = 0; r < kMaskedAtOnce; ++r) {
      const int64_t row = first + r * kReluRows;
      if (row >= end) break;
      float values[kVector], activations[kVector];
      gradients[r].get(values);
      outputs[r].get(activations);
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        if (activations[k] <= 0) values[k] = 0;  // a NaN lets the gradient pass
        own[k] += values[k];
      }
      Elements<scalar_t, kVector> masked;
      masked.set(values);
      masked.store(grad_input + row * width + column);
    }
  }
  auto* parts = reinterpret_cast<float*>(shared_memory());  // [rows, columns of the block]
  constexpr int kStride = kReluColumns * kVector;
  for (int k = 0; k < kVector; ++k) {
    parts[threadIdx.y * kStride + threadIdx.x * kVector + k] = own[k];
  }
  __syncthreads();
  for (int i = threadIdx.y * kReluColumns + threadIdx.x; i < kStride;
       i += kReluColumns * kReluRows) {
    const int64_t their_column = int64_t{strip} * kStride + i;
    if (their_column >= width) continue;
    float total = 0;
    for (int row = 0; row < kReluRows; ++row) total += parts[row * kStride + i];
    sums[sum * width + their_column] = total;
  }
}

// A thread owns a column and adds up its partial sums, each read once, in order.
__global__ void add_sums(const float* sums, int64_t num_sums, int64_t width, float* grad_bias) {
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= width) return;
  float total = 0;
#pragma unroll 16
  for (int64_t sum = 0; sum < num_sums; ++sum) total += sums[sum * width + column];
  grad_bias[column] = total;
}

std::tuple<Tensor, Tensor> relu_bias_backward(const Tensor& grad, const Tensor& output) {
  const ReluBiasBackwardInputs inputs(grad, output);
  const int64_t batch = inputs.batch, width = inputs.width;
  const Launcher launch("relu_bias_backward", inputs.grad);
  Tensor grad_input = torch::stable::new_empty(inputs.grad, {batch, width});
  Tensor grad_bias = torch::stable::new_empty(inputs.grad, {width}, ScalarType::Float);
  const int64_t num_sums = ceil_div(batch, kRowsOfASum);
  Tensor sums = torch::stable::new_empty(inputs.grad, {num_sums, width}, ScalarType::Float);
  float* sums_data = sums.mutable_data_ptr<float>();
  dispatch_floating(grad.scalar_type(), [&]<typename scalar_t>() {
    const auto* grad_data = inputs.grad.const_data_ptr<scalar_t>();
    const auto* output_data = inputs.output.const_data_ptr<scalar_t>();
    auto* input_data = grad_input.mutable_data_ptr<scalar_t>();
    dispatch_vector<scalar_t>(width, {grad_data, output_data, input_data}, [&]<int kVector>() {
      const int64_t strips = ceil_div(width, kReluColumns * kVector);
      launch(mask_rows<scalar_t, kVector>, num_sums * strips, dim3(kReluColumns, kReluRows),
             kReluColumns * kReluRows * kVector * sizeof(float), grad_data, output_data, batch,
             width, strips, input_data, sums_data);
    });
  });
  launch(add_sums, ceil_div(width, 128), 128, 0, sums_data, num_sums, width,
         grad_bias.mutable_data_ptr<float>());
  return {grad_input, grad_bias};
}

}  // namespace
}  // namespace dlrm

DLRM_CUDA_IMPL(m) { m.impl("relu_bias_backward", TORCH_BOX(&dlrm::relu_bias_backward)); }
