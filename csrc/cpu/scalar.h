// Numbers that an op takes as tensors of one value.
#pragma once

#include "../tensors.h"

namespace dlrm {

inline double scalar(const char* name, const char* what, const Tensor& tensor) {
  DLRM_CHECK(tensor.numel() == 1 && tensor.is_cpu(), name, ": expected ", what,
             " to be one value on the CPU, got ", shape_of(tensor));
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return *tensor.const_data_ptr<float>();
    case ScalarType::Double:
      return *tensor.const_data_ptr<double>();
    case ScalarType::Long:
      return static_cast<double>(*tensor.const_data_ptr<int64_t>());
    case ScalarType::Bool:
      return *tensor.const_data_ptr<bool>();
    default:
      fail(name, ": expected ", what, " to be Float, Double, Long or Bool, got ", dtype_of(tensor));
      return 0;
  }
}

}  // namespace dlrm
