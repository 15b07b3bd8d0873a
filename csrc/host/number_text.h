// Reads texts of decimal numbers.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace dlrm::host {

// The parts of a text of digits with, perhaps, a minus, a fraction and an exponent: 12, -0.5, 1e-7.
// The number is `digits` times 10 to the power of `exponent`, if neither has too many places.
struct Decimal {
  bool negative = false;
  uint64_t digits = 0;
  int64_t places = 0;  // without zeros before the first of them
  int64_t exponent = 0;
  int64_t exponent_places = 0;
};

// Reads digits, from the first of them on.
inline const char* read_digits(const char* p, const char* end, Decimal* number) {
  for (; p != end && *p >= '0' && *p <= '9'; ++p) {
    number->digits = number->digits * 10 + static_cast<uint64_t>(*p - '0');
    number->places += number->places > 0 || *p != '0';
  }
  return p;
}

// Returns false if a text is no number.
inline bool read_decimal(const char* p, const char* end, Decimal* number) {
  number->negative = p != end && *p == '-';
  p += number->negative;
  const char* whole = p;
  p = read_digits(p, end, number);
  if (p == whole) return false;
  if (p != end && *p == '.') {
    const char* fraction = ++p;
    p = read_digits(p, end, number);
    if (p == fraction) return false;
    number->exponent = fraction - p;
  }
  if (p != end && (*p == 'e' || *p == 'E')) {
    ++p;
    const bool negative = p != end && *p == '-';
    p += negative || (p != end && *p == '+');
    Decimal exponent;
    const char* first = p;
    p = read_digits(p, end, &exponent);
    if (p == first) return false;
    number->exponent_places = exponent.places;
    const auto power = static_cast<int64_t>(exponent.digits);
    if (exponent.places < 6) number->exponent += negative ? -power : power;
  }
  return p == end;
}

inline constexpr int kMostPower = 27;  // 5 to the power of it fits 63 bits

inline constexpr std::array<uint64_t, kMostPower + 1> kPowersOf5 = [] {
  std::array<uint64_t, kMostPower + 1> powers{1};
  for (int i = 1; i <= kMostPower; ++i) powers[i] = powers[i - 1] * 5;
  return powers;
}();

inline constexpr int kMostExact = 22;  // 10 to the power of it is a double

inline constexpr std::array<double, kMostExact + 1> kPowersOf10 = [] {
  std::array<double, kMostExact + 1> powers{1};
  for (int i = 1; i <= kMostExact; ++i) powers[i] = powers[i - 1] * 10;
  return powers;
}();

inline double power_of_2(int exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(1023 + exponent) << 52);
}

// Returns the double that is nearest to `digits` times 10 to the power of `exponent`, which is at
// most `kMostPower` either way.
inline double nearest_double(uint64_t digits, int exponent) {
  constexpr uint64_t kExact = uint64_t{1} << 53;
  if (digits <= kExact && exponent <= kMostExact && exponent >= -kMostExact) {
    const auto value = static_cast<double>(digits);  // one rounding follows
    return exponent < 0 ? value / kPowersOf10[-exponent] : value * kPowersOf10[exponent];
  }
  using Wide = unsigned __int128;
  if (exponent >= 0) {
    const Wide product = static_cast<Wide>(digits) * kPowersOf5[exponent];
    return static_cast<double>(product) * power_of_2(exponent);
  }
  const int shift = std::countl_zero(digits);
  const Wide dividend = static_cast<Wide>(digits << shift) << 64;
  const uint64_t divisor = kPowersOf5[-exponent];
  Wide quotient = dividend / divisor;  // of 65 bits or more, of which the last is not decisive
  quotient |= quotient * divisor != dividend;
  return static_cast<double>(quotient) * power_of_2(exponent - 64 - shift);
}

// Reads the double that is nearest to a number. Returns false if the text is no number, or has
// more digits, or a larger exponent, than numbers usually have.
inline bool read_double(const char* p, const char* end, double* value) {
  Decimal number;
  if (!read_decimal(p, end, &number) || number.places > 19 || number.exponent_places > 5) {
    return false;
  }
  if (number.digits != 0) {
    if (number.exponent > kMostPower || number.exponent < -kMostPower) return false;
    *value = nearest_double(number.digits, static_cast<int>(number.exponent));
  } else {
    *value = 0;
  }
  if (number.negative) *value = -*value;
  return true;
}

}  // namespace dlrm::host
