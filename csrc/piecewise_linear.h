// Sizes and checks of one call of piecewise_linear or its gradient, for every backend.
#pragma once

#include "tensors.h"

namespace dlrm {

// Arguments of both calls: the bins of all fields.
struct Bins {
  static constexpr const char* kName = "piecewise_linear";

  int64_t fields;
  int64_t bins;
  Tensor edges;  // [fields, bins + 1] float, contiguous

  explicit Bins(const Tensor& edges_) {
    DLRM_EXPECT(
        edges_,
        edges_.dim() == 2 && edges_.size(1) >= 2 && edges_.scalar_type() == ScalarType::Float,
        kName, ": expected edges [fields, bins + 1 > 1] Float");
    fields = edges_.size(0);
    bins = edges_.size(1) - 1;
    edges = as_contiguous(edges_);
  }

  Tensor checked_numerical(const Tensor& numerical) const {
    DLRM_EXPECT(numerical, has_shape(numerical, {-1, fields}) && fits(numerical), kName,
                ": expected numerical [batch, ", fields, "] Float on the device of edges ",
                shape_of(edges));
    return as_contiguous(numerical);
  }

  void check_weights(const Tensor& weight, const Tensor& bias) const {
    DLRM_EXPECT(weight, has_shape(weight, {fields, bins, -1}) && weight.size(2) > 0 && fits(weight),
                kName, ": expected weight [", fields, ", ", bins,
                ", dim > 0] Float on the device of edges");
    DLRM_EXPECT(bias, has_shape(bias, {fields, weight.size(2)}) && fits(bias), kName,
                ": expected bias [", fields, ", ", weight.size(2),
                "] Float on the device of edges");
  }

  Tensor checked_grad(const Tensor& numerical, const Tensor& grad) const {
    DLRM_EXPECT(grad,
                has_shape(grad, {numerical.size(0), fields, -1}) && grad.size(2) > 0 && fits(grad),
                kName, ": expected grad [", numerical.size(0), ", ", fields,
                ", dim > 0] Float on the device of edges");
    return as_contiguous(grad);
  }

 private:
  bool fits(const Tensor& tensor) const {
    return tensor.scalar_type() == ScalarType::Float && tensor.device() == edges.device();
  }
};

}  // namespace dlrm
