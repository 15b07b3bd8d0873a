// Sizes and checks of one call of piecewise_linear or its gradient, for every backend.
#pragma once

#include "tensors.h"

namespace dlrm {

constexpr const char* kPiecewiseName = "piecewise_linear";

// Arguments of both calls: the bins of all fields.
struct Bins {
  int64_t fields;
  int64_t bins;
  Tensor edges;  // [fields, bins + 1] float, contiguous

  explicit Bins(const Tensor& edges_) {
    DLRM_CHECK(
        edges_.dim() == 2 && edges_.size(1) >= 2 && edges_.scalar_type() == ScalarType::Float,
        kPiecewiseName, ": expected edges [fields, bins + 1 > 1] Float, got ", shape_of(edges_),
        " ", dtype_of(edges_));
    fields = edges_.size(0);
    bins = edges_.size(1) - 1;
    edges = as_contiguous(edges_);
  }

  Tensor checked_numerical(const Tensor& numerical) const {
    DLRM_CHECK(
        numerical.dim() == 2 && numerical.size(1) == fields &&
            numerical.scalar_type() == ScalarType::Float && numerical.device() == edges.device(),
        kPiecewiseName, ": expected numerical [batch, ", fields, "] Float on the device of edges ",
        shape_of(edges), ", got ", shape_of(numerical), " ", dtype_of(numerical));
    return as_contiguous(numerical);
  }
};

inline void check_piecewise_weights(const Bins& bins, const Tensor& weight, const Tensor& bias) {
  DLRM_CHECK(weight.dim() == 3 && weight.size(0) == bins.fields && weight.size(1) == bins.bins &&
                 weight.size(2) > 0 && weight.scalar_type() == ScalarType::Float,
             kPiecewiseName, ": expected weight [", bins.fields, ", ", bins.bins,
             ", dim > 0] Float, got ", shape_of(weight), " ", dtype_of(weight));
  DLRM_CHECK(bias.dim() == 2 && bias.size(0) == bins.fields && bias.size(1) == weight.size(2) &&
                 bias.scalar_type() == ScalarType::Float,
             kPiecewiseName, ": expected bias [", bins.fields, ", ", weight.size(2),
             "] Float, got ", shape_of(bias), " ", dtype_of(bias));
  DLRM_CHECK(weight.device() == bins.edges.device() && bias.device() == bins.edges.device(),
             kPiecewiseName, ": edges, weight and bias are not all on one device");
}

inline Tensor checked_piecewise_grad(const Bins& bins, const Tensor& numerical,
                                     const Tensor& grad) {
  DLRM_CHECK(grad.dim() == 3 && grad.size(0) == numerical.size(0) && grad.size(1) == bins.fields &&
                 grad.size(2) > 0 && grad.scalar_type() == ScalarType::Float &&
                 grad.device() == numerical.device(),
             kPiecewiseName, ": expected grad [", numerical.size(0), ", ", bins.fields,
             ", dim > 0] Float, got ", shape_of(grad), " ", dtype_of(grad));
  return as_contiguous(grad);
}

}  // namespace dlrm
