// Sizes and checks of one dot_interaction call, for every backend.
#pragma once

#include "tensors.h"

namespace dlrm {

struct InteractionSizes {
  int64_t batch;
  int64_t tables;
  int64_t dim;

  int64_t vectors() const { return tables + 1; }
  int64_t dots() const { return vectors() * tables / 2; }
  // Keep in step with interaction_width in dlrm/ops/dot_interaction.py.
  int64_t width() const { return (dim + dots() + 7) / 8 * 8; }
};

struct InteractionInputs {
  InteractionSizes sizes;
  Tensor dense;       // [batch, dim], contiguous
  Tensor embeddings;  // [batch, tables, dim], contiguous

  InteractionInputs(const Tensor& dense_, const Tensor& embeddings_) {
    const bool fits = dense_.dim() == 2 && embeddings_.dim() == 3 &&
                      dense_.size(0) == embeddings_.size(0) &&
                      dense_.size(1) == embeddings_.size(2);
    DLRM_CHECK(fits,
               "dot_interaction: expected dense [batch, dim] and embeddings [batch, tables, dim],",
               " got dense ", shape_of(dense_), " and embeddings ", shape_of(embeddings_));
    DLRM_CHECK(dense_.size(1) > 0, "dot_interaction: expected dim > 0, got dense ",
               shape_of(dense_), " and embeddings ", shape_of(embeddings_));
    DLRM_CHECK(
        is_floating(dense_.scalar_type()) && dense_.scalar_type() == embeddings_.scalar_type(),
        "dot_interaction: expected dense and embeddings of one dtype (Float, BFloat16 or Half),",
        " got dense ", dtype_of(dense_), " and embeddings ", dtype_of(embeddings_));
    DLRM_CHECK(dense_.device() == embeddings_.device(),
               "dot_interaction: dense and embeddings are on different devices");
    sizes = {embeddings_.size(0), embeddings_.size(1), embeddings_.size(2)};
    dense = as_contiguous(dense_);
    embeddings = as_contiguous(embeddings_);
  }

  // Returns the gradient of the output, contiguous.
  Tensor checked_grad(const Tensor& grad) const {
    DLRM_CHECK(grad.dim() == 2 && grad.size(0) == sizes.batch && grad.size(1) == sizes.width() &&
                   grad.scalar_type() == dense.scalar_type(),
               "dot_interaction_backward: expected grad [", sizes.batch, ", ", sizes.width(), "] ",
               dtype_of(dense), ", got ", shape_of(grad), " ", dtype_of(grad));
    return as_contiguous(grad);
  }
};

}  // namespace dlrm
