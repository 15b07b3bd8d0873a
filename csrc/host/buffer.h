// An array that grows. It has no exceptions and no destructor, so that the library needs nothing
// of a C++ runtime, which a server may have in another version.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace dlrm::host {

// The owner calls `release`. Without memory for more elements `failed` is set, and they are lost.
template <typename T>
struct Buffer {
  static_assert(std::is_trivially_copyable_v<T>);

  T* data = nullptr;
  int64_t size = 0;
  int64_t capacity = 0;
  bool failed = false;

  T& operator[](int64_t i) { return data[i]; }
  const T& operator[](int64_t i) const { return data[i]; }
  const T* begin() const { return data; }
  const T* end() const { return data + size; }

  bool reserve(int64_t wanted) {
    if (wanted <= capacity) return true;
    const int64_t grown = std::max(wanted, capacity + capacity / 2);
    auto* moved = static_cast<T*>(std::realloc(data, grown * sizeof(T)));
    failed = moved == nullptr;
    if (failed) return false;
    data = moved, capacity = grown;
    return true;
  }

  bool add(const T& element) {
    if (size == capacity && !reserve(std::max<int64_t>(size + 1, 16))) return false;
    data[size++] = element;
    return true;
  }

  bool add(const T* elements, int64_t count) {
    if (!reserve(size + count)) return false;
    if (count > 0) std::memcpy(data + size, elements, count * sizeof(T));
    size += count;
    return true;
  }

  void release() { std::free(data); }
};

}  // namespace dlrm::host
