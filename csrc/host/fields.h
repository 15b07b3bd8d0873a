// Parses fields of rows, given by start and end: integers, then hexadecimal hashes.
#pragma once

#include "log_parser.h"

namespace dlrm::host {

// Field `[column, row]` is `data[starts[column, row]:ends[column, row]]`.
struct Fields {
  const char* data;
  int64_t size;
  const int64_t* starts;
  const int64_t* ends;
  int64_t num_numerical;
  int64_t columns;
  int64_t rows;
};

inline bool parse_field(const char* begin, const char* end, bool is_integer, uint64_t* value,
                        uint8_t* missing) {
  if (is_integer) {
    int64_t integer;
    if (!read_integer(begin, end, &integer, missing)) return false;
    *value = static_cast<uint64_t>(integer);
  } else if (!read_hash(begin, end, value, missing)) {
    return false;
  }
  return begin == end;
}

// Fills `values` and `missing`, `[columns, rows]`; returns `row * columns + column` of the first
// field that is unreadable or outside the data, or -1.
inline int64_t parse_fields(const Fields& fields, uint64_t* values, uint8_t* missing) {
  for (int64_t row = 0; row < fields.rows; ++row) {
    for (int64_t column = 0; column < fields.columns; ++column) {
      const int64_t i = column * fields.rows + row;
      const int64_t start = fields.starts[i], end = fields.ends[i];
      if (start < 0 || start > end || end > fields.size ||
          !parse_field(fields.data + start, fields.data + end, column < fields.num_numerical,
                       values + i, missing + i)) {
        return row * fields.columns + column;
      }
    }
  }
  return -1;
}

}  // namespace dlrm::host
