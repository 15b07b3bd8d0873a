#include "../dot_interaction.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "isa.h"
#include "network.h"

#define DLRM_KERNELS "dot_interaction_kernels.h"
#include "for_each_isa.h"

namespace dlrm {
namespace {

constexpr int64_t kSamplesPerTask = 32;

}  // namespace

Tensor dot_interaction(const Tensor& dense, const Tensor& embeddings) {
  const InteractionInputs inputs(dense, embeddings);
  const InteractionSizes& sizes = inputs.sizes;
  Tensor output = allocate(inputs.dense, {sizes.batch, sizes.width()});
  dispatch_floating(dense.scalar_type(), [&]<typename scalar_t>() {
    const auto* dense_data = inputs.dense.const_data_ptr<scalar_t>();
    const auto* embeddings_data = inputs.embeddings.const_data_ptr<scalar_t>();
    auto* output_data = output.mutable_data_ptr<scalar_t>();
    const auto forward = DLRM_KERNEL(forward_samples<scalar_t>);
    const int64_t scratch_floats = DLRM_KERNEL(forward_scratch_floats<scalar_t>)(sizes);
    torch::stable::parallel_for(0, sizes.batch, kSamplesPerTask, [&](int64_t begin, int64_t end) {
      const Scratch<float> scratch(scratch_floats);
      forward(sizes, dense_data, embeddings_data, output_data, scratch.get(), begin, end);
    });
  });
  return output;
}

std::tuple<Tensor, Tensor> dot_interaction_backward(const Tensor& grad, const Tensor& dense,
                                                    const Tensor& embeddings) {
  const InteractionInputs inputs(dense, embeddings);
  const InteractionSizes& sizes = inputs.sizes;
  const Tensor checked_grad = inputs.checked_grad(grad);
  Tensor grad_dense = allocate(inputs.dense, {sizes.batch, sizes.dim});
  Tensor grad_embeddings = allocate(inputs.dense, {sizes.batch, sizes.tables, sizes.dim});
  dispatch_floating(dense.scalar_type(), [&]<typename scalar_t>() {
    const auto* grad_data = checked_grad.const_data_ptr<scalar_t>();
    const auto* dense_data = inputs.dense.const_data_ptr<scalar_t>();
    const auto* embeddings_data = inputs.embeddings.const_data_ptr<scalar_t>();
    auto* grad_dense_data = grad_dense.mutable_data_ptr<scalar_t>();
    auto* grad_embeddings_data = grad_embeddings.mutable_data_ptr<scalar_t>();
    const int64_t rows = sizes.batch * sizes.tables;
    const bool stream =
        streams(grad_embeddings_data, rows, sizes.dim) && streams(grad_dense_data, rows, sizes.dim);
    const auto backward = stream ? DLRM_KERNEL(backward_samples<scalar_t, true>)
                                 : DLRM_KERNEL(backward_samples<scalar_t, false>);
    const int64_t scratch_floats = DLRM_KERNEL(backward_scratch_floats<scalar_t>)(sizes);
    torch::stable::parallel_for(0, sizes.batch, kSamplesPerTask, [&](int64_t begin, int64_t end) {
      const Scratch<float> scratch(scratch_floats);
      const Scratch<scalar_t*> places(sizes.vectors());
      backward(sizes, grad_data, dense_data, embeddings_data, grad_dense_data, grad_embeddings_data,
               scratch.get(), places.get(), begin, end);
    });
  });
  return {grad_dense, grad_embeddings};
}

}  // namespace dlrm

STABLE_TORCH_LIBRARY_IMPL(dlrm, CPU, m) {
  m.impl("dot_interaction", TORCH_BOX(&dlrm::dot_interaction));
  m.impl("dot_interaction_backward", TORCH_BOX(&dlrm::dot_interaction_backward));
}
