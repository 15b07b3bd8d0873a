#include "../piecewise_linear.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "isa.h"
#include "rows.h"

namespace dlrm {
namespace {

// Location of a value: its bin, and the share of the bin below it.
struct BinPlace {
  int64_t bin;
  float share;
};

struct BinsOfField {
  const float* edges;  // [bins + 1], ascending; bins without width are those of repeated edges
  int64_t bins;

  float width(int64_t bin) const { return edges[bin + 1] - edges[bin]; }

  // Values beyond the edges count as the nearest one; NaN has the share NaN.
  BinPlace place(float value) const {
    const float* first = edges;
    for (int64_t left = bins + 1; left > 1;) {  // without a branch, which would be mispredicted
      const int64_t half = left / 2;
      first += first[half - 1] <= value ? half : 0;
      left -= half;
    }
    const int64_t not_above = first - edges + (*first <= value);
    const int64_t bin = std::clamp<int64_t>(not_above - 1, 0, bins - 1);
    const float size = width(bin);
    if (!(size > 0)) return {bin, value == value ? 0.0f : value};
    return {bin, std::clamp((value - edges[bin]) * (1 / size), 0.0f, 1.0f)};
  }
};

}  // namespace
}  // namespace dlrm

#define DLRM_KERNELS "piecewise_linear_kernels.h"
#include "for_each_isa.h"

namespace dlrm {
namespace {

constexpr int64_t kElementsPerTask = 32768;

// A task owns fields, so that sums have one order at any thread count.
Tensor piecewise_linear(const Tensor& numerical_, const Tensor& edges, const Tensor& weight_,
                        const Tensor& bias_) {
  const Bins bins(edges);
  const Tensor numerical = bins.checked_numerical(numerical_);
  bins.check_weights(weight_, bias_);
  const Tensor weight = as_contiguous(weight_);
  const Tensor bias = as_contiguous(bias_);
  const int64_t batch = numerical.size(0), dim = weight.size(2);
  Tensor output = allocate(weight, {batch, bins.fields, dim});
  const float* edges_data = bins.edges.const_data_ptr<float>();
  const float* numerical_data = numerical.const_data_ptr<float>();
  const float* weight_data = weight.const_data_ptr<float>();
  const float* bias_data = bias.const_data_ptr<float>();
  float* output_data = output.mutable_data_ptr<float>();
  const auto kernel = DLRM_KERNEL(piecewise_field);
  const int64_t grain = kElementsPerTask / std::max<int64_t>(1, (bins.bins + batch) * dim) + 1;
  torch::stable::parallel_for(0, bins.fields, grain, [&](int64_t begin, int64_t end) {
    const Scratch<float> starts(bins.bins * dim);
    for (int64_t f = begin; f < end; ++f) {
      const BinsOfField field{edges_data + f * (bins.bins + 1), bins.bins};
      kernel(field, numerical_data + f, bins.fields, weight_data + f * bins.bins * dim,
             bias_data + f * dim, dim, starts.get(), output_data + f * dim, batch);
    }
  });
  return output;
}

std::tuple<Tensor, Tensor> piecewise_linear_backward(const Tensor& grad_, const Tensor& numerical_,
                                                     const Tensor& edges) {
  const Bins bins(edges);
  const Tensor numerical = bins.checked_numerical(numerical_);
  const Tensor grad = bins.checked_grad(numerical, grad_);
  const int64_t batch = numerical.size(0), dim = grad.size(2);
  Tensor grad_weight = allocate(grad, {bins.fields, bins.bins, dim});
  Tensor grad_bias = allocate(grad, {bins.fields, dim});
  const float* edges_data = bins.edges.const_data_ptr<float>();
  const float* numerical_data = numerical.const_data_ptr<float>();
  const float* grad_data = grad.const_data_ptr<float>();
  float* weight_data = grad_weight.mutable_data_ptr<float>();
  float* bias_data = grad_bias.mutable_data_ptr<float>();
  const auto kernel = DLRM_KERNEL(piecewise_field_backward);
  torch::stable::parallel_for(0, bins.fields, 1, [&](int64_t begin, int64_t end) {
    const Scratch<float> sums(bins.bins * dim);
    for (int64_t f = begin; f < end; ++f) {
      const BinsOfField field{edges_data + f * (bins.bins + 1), bins.bins};
      kernel(field, numerical_data + f, bins.fields, grad_data + f * dim, dim, sums.get(),
             weight_data + f * bins.bins * dim, bias_data + f * dim, batch);
    }
  });
  return {grad_weight, grad_bias};
}

}  // namespace
}  // namespace dlrm

STABLE_TORCH_LIBRARY_IMPL(dlrm, CPU, m) {
  m.impl("piecewise_linear", TORCH_BOX(&dlrm::piecewise_linear));
  m.impl("piecewise_linear_backward", TORCH_BOX(&dlrm::piecewise_linear_backward));
}
