// CRC-32C (Castagnoli), with the processor's instruction if it has one.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

namespace dlrm::store {

inline uint32_t crc32c_by_table(uint32_t crc, const char* data, int64_t size) {
  static const auto table = [] {
    std::array<uint32_t, 256> made{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0x82F63B78u : 0u);
      made[i] = value;
    }
    return made;
  }();
  for (int64_t i = 0; i < size; ++i) {
    crc = table[(crc ^ static_cast<uint8_t>(data[i])) & 0xFF] ^ (crc >> 8);
  }
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) inline uint32_t crc32c_by_instruction(uint32_t crc,
                                                                        const char* data,
                                                                        int64_t size) {
  uint64_t value = crc;
  for (; size >= 8; data += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    value = __builtin_ia32_crc32di(value, word);
  }
  for (; size > 0; ++data, --size) {
    value = __builtin_ia32_crc32qi(static_cast<uint32_t>(value), static_cast<uint8_t>(*data));
  }
  return static_cast<uint32_t>(value);
}
#endif

// The checksum of data that follow other data with the checksum `before`.
inline uint32_t crc32c(uint32_t before, const char* data, int64_t size) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return ~crc32c_by_instruction(~before, data, size);
#endif
  return ~crc32c_by_table(~before, data, size);
}

}  // namespace dlrm::store
