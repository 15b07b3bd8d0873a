// Parses lines `label <tab> integers <tab> hexadecimal hashes` of a log into columns of numbers.
//
// One pass reads each character once, eight at a time if a hash has eight digits. An unreadable
// line ends the parsing, and the caller describes the error.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

namespace dlrm::host {

// Columns to fill, `[columns, capacity]`; the caller owns them.
struct ParsedLines {
  int64_t num_numerical;
  int64_t num_categorical;
  bool labeled;
  int64_t capacity;
  bool* labels;
  int64_t* integers;
  uint64_t* hashes;
  bool* missing;  // of the integers, then of the hashes
  int64_t parsed = 0;
};

inline int64_t count_lines(const char* begin, const char* end) {
  int64_t lines = 0;
  for (const char* p = begin; p != end; ++lines) {
    const auto* last = static_cast<const char*>(std::memchr(p, '\n', end - p));
    p = last == nullptr ? end : last + 1;
  }
  return lines;
}

inline constexpr int kMaxDecimalDigits = 18;  // so that every number fits int64
inline constexpr int kMaxHexadecimalDigits = 16;
inline constexpr uint8_t kNoDigit = 255;

inline constexpr std::array<uint8_t, 256> kDigits = [] {
  std::array<uint8_t, 256> digits{};
  digits.fill(kNoDigit);
  for (int i = 0; i < 10; ++i) digits['0' + i] = i;
  for (int i = 0; i < 6; ++i) digits['a' + i] = digits['A' + i] = 10 + i;
  return digits;
}();

constexpr uint64_t repeated(uint8_t byte) { return byte * 0x0101010101010101; }

// Reads eight hexadecimal digits, the first one in the lowest byte; false if one is not a digit.
inline bool eight_digits(uint64_t text, uint64_t* value) {
  const uint64_t letters = (text >> 6) & repeated(1);
  const uint64_t nibbles = (text & repeated(0x0F)) + letters * 9;
  // Writing these nibbles in lower case must give the digits again.
  const uint64_t above_nine = ((nibbles + repeated(6)) >> 4) & repeated(1);
  const uint64_t written = nibbles + repeated('0') + above_nine * ('a' - '0' - 10);
  if (((written ^ (text | (letters << 5))) | (nibbles & repeated(0x10))) != 0) return false;
  uint64_t x = __builtin_bswap64(nibbles);
  x = (x | (x >> 4)) & 0x00FF00FF00FF00FF;
  x = (x | (x >> 8)) & 0x0000FFFF0000FFFF;
  *value = (x | (x >> 16)) & 0xFFFFFFFF;
  return true;
}

// Each reader starts at a field, moves the pointer behind it, and returns false if it is not a
// number. An empty field is read as 0, and sets `missing`.

inline bool read_integer(const char*& p, const char* end, int64_t* value, bool* missing) {
  const bool negative = p != end && *p == '-';
  const char* first = p += negative;
  uint64_t number = 0;
  for (; p != end && p - first <= kMaxDecimalDigits; ++p) {
    const uint8_t digit = static_cast<uint8_t>(*p - '0');
    if (digit > 9) break;
    number = number * 10 + digit;
  }
  *missing = p == first;
  *value = negative ? -static_cast<int64_t>(number) : static_cast<int64_t>(number);
  return p - first <= kMaxDecimalDigits && !(negative && p == first);
}

inline bool read_hash(const char*& p, const char* end, uint64_t* value, bool* missing) {
  if constexpr (std::endian::native == std::endian::little) {
    if (end - p > 8 && (p[8] == '\t' || p[8] == '\n')) {
      uint64_t text;
      std::memcpy(&text, p, 8);
      if (eight_digits(text, value)) {
        *missing = false;
        p += 8;
        return true;
      }
    }
  }
  const char* first = p;
  uint64_t number = 0;
  for (; p != end && p - first <= kMaxHexadecimalDigits; ++p) {
    const uint8_t digit = kDigits[static_cast<uint8_t>(*p)];
    if (digit == kNoDigit) break;
    number = number << 4 | digit;
  }
  *missing = p == first;
  *value = number;
  return p - first <= kMaxHexadecimalDigits;
}

// Whether this is the end of a line, which has two characters in files of Windows.
inline bool at_line_end(const char* p, const char* end) {
  return p == end || *p == '\n' || (*p == '\r' && (p + 1 == end || p[1] == '\n'));
}

// Reads one line into row `lines.parsed`; false if it is unreadable.
inline bool parse_line(const char*& p, const char* end, ParsedLines& lines) {
  const int64_t row = lines.parsed, rows = lines.capacity;
  if (at_line_end(p, end)) return false;  // an empty line
  bool more = true;  // a field follows, and p is at it; else p is at the line's end
  const auto next_field = [&] {
    more = p != end && *p == '\t';
    p += more;
    return more || at_line_end(p, end);
  };
  lines.labels[row] = false;
  if (lines.labeled) {
    if (*p != '0' && *p != '1') return false;
    lines.labels[row] = *p++ == '1';
    if (!next_field()) return false;
  }
  bool* missing = lines.missing + row;
  for (int64_t i = 0; i < lines.num_numerical; ++i, missing += rows) {
    int64_t* value = lines.integers + i * rows + row;
    if (!more) {
      *value = 0, *missing = true;
    } else if (!read_integer(p, end, value, missing) || !next_field()) {
      return false;
    }
  }
  for (int64_t i = 0; i < lines.num_categorical; ++i, missing += rows) {
    uint64_t* value = lines.hashes + i * rows + row;
    if (!more) {
      *value = 0, *missing = true;
    } else if (!read_hash(p, end, value, missing) || !next_field()) {
      return false;
    }
  }
  if (more) return false;  // too many fields
  if (p != end && *p == '\r') ++p;
  if (p != end) ++p;
  return true;
}

// Fills the columns; returns `end`, or the start of the first line that cannot be read.
inline const char* parse_lines(const char* begin, const char* end, ParsedLines& lines) {
  for (const char* p = begin; p != end; ++lines.parsed) {
    const char* line = p;
    if (!parse_line(p, end, lines)) return line;
  }
  return end;
}

}  // namespace dlrm::host
