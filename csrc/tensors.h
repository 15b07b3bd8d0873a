// Arguments of all ops: names for messages, and dispatch over dtypes.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace dlrm {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws a RuntimeError with only what the user can act on. STD_TORCH_CHECK would prepend the
// location in our source.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// Fails unless the condition holds. The parts of the message are evaluated only then: printing two
// shapes takes as long as a small kernel.
#define DLRM_CHECK(condition, ...) \
  do {                             \
    if (!(condition)) [[unlikely]] \
      ::dlrm::fail(__VA_ARGS__);   \
  } while (false)

// "[2, 3]", as Python prints a shape.
inline std::string shape_of(const Tensor& tensor) {
  std::ostringstream text;
  const char* separator = "[";
  for (int64_t size : tensor.sizes()) {
    text << separator << size;
    separator = ", ";
  }
  text << (tensor.dim() == 0 ? "[]" : "]");
  return text.str();
}

// torch's own functions find their operator by name at every call, which takes 1 us.
inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// A contiguous tensor without values on the device of another, by default of its dtype.
inline Tensor allocate(const Tensor& like, std::initializer_list<int64_t> sizes,
                       std::optional<ScalarType> dtype = std::nullopt) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(1, sizes.begin()[i]);
  }
  const ScalarType type = dtype.value_or(like.scalar_type());
  int32_t device_type;
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  const auto error = aoti_torch_empty_strided(
      sizes.size(), sizes.begin(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)), device_type,
      like.get_device_index(), &made);
  DLRM_CHECK(error == AOTI_TORCH_SUCCESS, "no memory for ", stride, " values of ",
             torch::headeronly::toString(type));
  return Tensor(made);
}

inline const char* dtype_of(const Tensor& tensor) {
  return torch::headeronly::toString(tensor.scalar_type());
}

// Fails unless the condition holds; the message is what was expected and the tensor's shape and
// dtype.
#define DLRM_EXPECT(tensor, condition, ...)                                   \
  DLRM_CHECK(condition, __VA_ARGS__, ", got ", ::dlrm::shape_of(tensor), " ", \
             ::dlrm::dtype_of(tensor))

// Whether a tensor has these sizes; -1 is any.
inline bool has_shape(const Tensor& tensor, std::initializer_list<int64_t> sizes) {
  if (tensor.dim() != static_cast<int64_t>(sizes.size())) return false;
  int64_t place = 0;
  for (int64_t size : sizes) {
    if (const int64_t own = tensor.size(place++); size >= 0 && own != size) return false;
  }
  return true;
}

inline bool is_floating(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
}

inline bool is_id(ScalarType dtype) {
  return dtype == ScalarType::Char || dtype == ScalarType::Short || dtype == ScalarType::Int ||
         dtype == ScalarType::Long;
}

// Calls f<scalar_t>() with the C++ type of a dtype that is_floating.
template <typename Function>
void dispatch_floating(ScalarType dtype, const Function& f) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return f.template operator()<BFloat16>();
    case ScalarType::Half:
      return f.template operator()<Half>();
    default:
      return f.template operator()<float>();
  }
}

// Calls f<id_t>() with the C++ type of a dtype that is_id.
template <typename Function>
void dispatch_id(ScalarType dtype, const Function& f) {
  switch (dtype) {
    case ScalarType::Char:
      return f.template operator()<int8_t>();
    case ScalarType::Short:
      return f.template operator()<int16_t>();
    case ScalarType::Int:
      return f.template operator()<int32_t>();
    default:
      return f.template operator()<int64_t>();
  }
}

}  // namespace dlrm
