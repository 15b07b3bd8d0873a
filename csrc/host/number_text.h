// Tells texts of decimal numbers from others.
#pragma once

namespace dlrm::host {

inline const char* skip_digits(const char* p, const char* end) {
  while (p != end && *p >= '0' && *p <= '9') ++p;
  return p;
}

// Whether a text is digits with, perhaps, a minus, a fraction and an exponent: 12, -0.5, 1e-7.
inline bool is_number(const char* p, const char* end) {
  p += p != end && *p == '-';
  const char* whole = p;
  p = skip_digits(p, end);
  if (p == whole) return false;
  if (p != end && *p == '.') {
    const char* fraction = ++p;
    p = skip_digits(p, end);
    if (p == fraction) return false;
  }
  if (p != end && (*p == 'e' || *p == 'E')) {
    ++p;
    p += p != end && (*p == '+' || *p == '-');
    const char* exponent = p;
    p = skip_digits(p, end);
    if (p == exponent) return false;
  }
  return p == end;
}

}  // namespace dlrm::host
