// The library dlrm/_host.so: the work of preprocessing and serving per byte of a log. No torch.
//
// Its interface is plain C, so that one file works with every Python. dlrm/data/sources/native.py
// is its only caller: it makes the arrays, checks types and sizes, and passes pointers.
#include "fields.h"
#include "id_lookup.h"
#include "log_parser.h"
#include "text_hash.h"

#define DLRM_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// A table of ids in the form of native.py; `ids` have `id_bytes` bytes each.
struct TableView {
  const uint64_t* hashes;
  const void* ids;
  const int64_t* directory;
  int64_t places;
  int64_t id_bytes;
};

// The ids of some numbers; the id of row i is written to `output[i * stride]`.
template <typename Id, typename Output>
void look_up(const TableView& view, int64_t rows, const uint64_t* values, const uint8_t* missing,
             Output* output, int64_t stride) {
  const dlrm::host::IdTable<Id> table(view.hashes, static_cast<const Id*>(view.ids), view.directory,
                                      view.places);
  for (int64_t row = 0; row < rows; ++row) {
    output[row * stride] = missing[row] ? Id{0} : table.find(values[row]);
  }
}

}  // namespace

// Changes with every change of this interface.
DLRM_EXPORT int64_t dlrm_host_version() { return 2; }

DLRM_EXPORT int64_t dlrm_count_lines(const char* text, int64_t size) {
  return dlrm::host::count_lines(text, text + size);
}

// Parses lines up to the first unreadable one; returns its start, or -1.
DLRM_EXPORT int64_t dlrm_parse_lines(const char* text, int64_t size,
                                     dlrm::host::ParsedLines* lines) {
  const char* stopped = dlrm::host::parse_lines(text, text + size, *lines);
  return stopped == text + size ? -1 : stopped - text;
}

// Parses fields; returns `row * columns + column` of the first unreadable one, or -1.
DLRM_EXPORT int64_t dlrm_parse_fields(const dlrm::host::Fields* fields, uint64_t* values,
                                      uint8_t* missing) {
  return dlrm::host::parse_fields(*fields, values, missing);
}

// Looks numbers up in one table; `output` has ids of its type.
DLRM_EXPORT void dlrm_look_up(const TableView* table, int64_t rows, const uint64_t* values,
                              const uint8_t* missing, void* output) {
  switch (table->id_bytes) {
    case 1:
      return look_up<int8_t>(*table, rows, values, missing, static_cast<int8_t*>(output), 1);
    case 2:
      return look_up<int16_t>(*table, rows, values, missing, static_cast<int16_t*>(output), 1);
    default:
      return look_up<int32_t>(*table, rows, values, missing, static_cast<int32_t*>(output), 1);
  }
}

// Looks up `[tables, rows]` numbers, each row of them in its table; `output` is `[rows, tables]`.
DLRM_EXPORT void dlrm_look_up_rows(const TableView* tables, int64_t num_tables, int64_t rows,
                                   const uint64_t* values, const uint8_t* missing,
                                   int32_t* output) {
  for (int64_t t = 0; t < num_tables; ++t, values += rows, missing += rows) {
    switch (tables[t].id_bytes) {
      case 1:
        look_up<int8_t>(tables[t], rows, values, missing, output + t, num_tables);
        break;
      case 2:
        look_up<int16_t>(tables[t], rows, values, missing, output + t, num_tables);
        break;
      default:
        look_up<int32_t>(tables[t], rows, values, missing, output + t, num_tables);
    }
  }
}

// Hashes texts `data[starts[i], ends[i])`.
DLRM_EXPORT void dlrm_hash_texts(const uint8_t* data, int64_t rows, const int64_t* starts,
                                 const int64_t* ends, uint64_t* hashes) {
  for (int64_t i = 0; i < rows; ++i) {
    hashes[i] = dlrm::host::hash_text(data + starts[i], ends[i] - starts[i]);
  }
}
