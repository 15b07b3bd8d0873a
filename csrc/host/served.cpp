// The library dlrm/_served.so: what a served model calls to read raw rows.
//
// Its interface is plain C, and it needs nothing of a C++ runtime, because the server may have
// another Python than the exporter, and older libraries. dlrm/data/sources/native.py is its only
// caller and has the same types.
#include "id_lookup.h"
#include "log_parser.h"

namespace {

using namespace dlrm::host;

// An `IdLookup`, whose ids have `id_bytes` bytes each.
struct Lookup {
  const uint64_t* hashes;
  const void* ids;
  const int64_t* directory;
  int64_t places;
  int64_t id_bytes;
};

bool parse_field(const char* begin, const char* end, bool is_integer, uint64_t* value,
                 bool* missing) {
  if (is_integer) {
    int64_t integer;
    if (!read_integer(begin, end, &integer, missing)) return false;
    *value = static_cast<uint64_t>(integer);
  } else if (!read_hash(begin, end, value, missing)) {
    return false;
  }
  return begin == end;
}

template <typename Id>
void look_up_in(const Lookup& lookup, int64_t rows, const uint64_t* numbers, const bool* missing,
                int32_t* output, int64_t stride) {
  const IdTable<Id> table(lookup.hashes, static_cast<const Id*>(lookup.ids), lookup.directory,
                          lookup.places);
  look_up(table, rows, numbers, missing, output, stride);
}

}  // namespace

// Parses fields `data[starts[column, row]:ends[column, row]]`, integers and then hexadecimal
// hashes, into `values` and `missing`, `[columns, rows]`, and looks up the ids of the hashes,
// `[rows, tables]`. Returns -1, or `row * columns + column` of the first field that is unreadable
// or outside the data, without looking up.
//
// The name changes with the parameters.
extern "C" __attribute__((visibility("default"))) int64_t
dlrm_encode_fields(const char* data, int64_t size, const int64_t* starts, const int64_t* ends,
                   int64_t num_numerical, int64_t num_tables, int64_t rows, const Lookup* lookups,
                   uint64_t* values, bool* missing, int32_t* ids) {
  const int64_t columns = num_numerical + num_tables;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      const int64_t i = column * rows + row, start = starts[i], end = ends[i];
      if (start < 0 || start > end || end > size ||
          !parse_field(data + start, data + end, column < num_numerical, values + i, missing + i)) {
        return row * columns + column;
      }
    }
  }
  values += num_numerical * rows, missing += num_numerical * rows;
  for (int64_t t = 0; t < num_tables; ++t, values += rows, missing += rows) {
    const int64_t bytes = lookups[t].id_bytes;
    const auto find = bytes == 1   ? look_up_in<int8_t>
                      : bytes == 2 ? look_up_in<int16_t>
                                   : look_up_in<int32_t>;
    find(lookups[t], rows, values, missing, ids + t, num_tables);
  }
  return -1;
}
