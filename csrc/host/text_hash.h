// The 64-bit number of a text, the same on every machine.
//
// A text is read as little-endian words of 8 bytes, the last one filled up with zeros. Each word is
// mixed into the state by a bijection of 64-bit numbers, so that texts of one length that differ in
// a single word never collide.
#pragma once

#include <cstdint>
#include <cstring>

namespace dlrm::host {

inline constexpr uint64_t kLengthFactor = 0x9E3779B97F4A7C15;
inline constexpr uint64_t kMixFactor = 0xD6E8FEB86659FD93;  // odd, as required for a bijection

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 32)) * kMixFactor;
  x = (x ^ (x >> 32)) * kMixFactor;
  return x ^ (x >> 32);
}

inline uint64_t hash_text(const uint8_t* text, int64_t size) {
  uint64_t state = static_cast<uint64_t>(size) * kLengthFactor;
  for (; size > 0; text += 8, size -= 8) {
    uint64_t word = 0;
    std::memcpy(&word, text, size < 8 ? size : 8);
    state = mix(state ^ word);
  }
  return state;
}

}  // namespace dlrm::host
