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

// Returns up to 8 bytes of a text as a little-endian word, which is filled up with zeros.
inline uint64_t word_of(const uint8_t* text, int64_t size) {
  uint64_t word = 0;
  if (size >= 8) {
    std::memcpy(&word, text, 8);
  } else if (size >= 4) {  // two halves, which overlap
    uint32_t low, high;
    std::memcpy(&low, text, 4);
    std::memcpy(&high, text + size - 4, 4);
    word = low | static_cast<uint64_t>(high) << (8 * (size - 4));
  } else if (size > 0) {
    word = text[0] | static_cast<uint64_t>(text[size / 2]) << (8 * (size / 2)) |
           static_cast<uint64_t>(text[size - 1]) << (8 * (size - 1));
  }
  return word;
}

inline uint64_t hash_text(const uint8_t* text, int64_t size) {
  uint64_t state = static_cast<uint64_t>(size) * kLengthFactor;
  for (; size > 0; text += 8, size -= 8) {
    state = mix(state ^ word_of(text, size));
  }
  return state;
}

}  // namespace dlrm::host
