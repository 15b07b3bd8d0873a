// The library dlrm/_host.so: the work of preprocessing and serving per byte of a log. No torch.
//
// Its interface is plain C, so that one file works with every Python. dlrm/data/sources/native.py
// is its only caller: it makes the arrays, checks types and sizes, and passes pointers.
#include <iterator>
#include <new>

#include "csv_block.h"
#include "fields.h"
#include "half.h"
#include "id_lookup.h"
#include "json_block.h"
#include "log_parser.h"
#include "number_text.h"
#include "text_hash.h"

#define DLRM_EXPORT extern "C" __attribute__((visibility("default")))

using dlrm::host::CellBlock;

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

// Returns a new block of columns; nullptr without memory.
CellBlock* new_block(int64_t width, const uint8_t* keep) {
  void* place = std::malloc(sizeof(CellBlock));
  return place == nullptr ? nullptr : new (place) CellBlock(width, keep);
}

}  // namespace

// Changes with every change of this interface.
DLRM_EXPORT int64_t dlrm_host_version() { return 5; }

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

// Says which of the texts `data[starts[i], ends[i])` are numbers in plain notation.
DLRM_EXPORT void dlrm_are_numbers(const char* data, int64_t rows, const int64_t* starts,
                                  const int64_t* ends, uint8_t* are) {
  for (int64_t i = 0; i < rows; ++i) {
    are[i] = dlrm::host::is_number(data + starts[i], data + ends[i]);
  }
}

// Rounds numbers to half precision; returns whether this processor can.
DLRM_EXPORT int64_t dlrm_to_half(const float* values, int64_t size, uint16_t* halves) {
  if (!dlrm::host::has_half()) return 0;
  dlrm::host::to_half(values, size, halves);
  return 1;
}

// Splits a block of CSV into columns, of which `keep` says what to keep; nullptr without memory.
// The caller frees the block by `dlrm_free_cells`.
DLRM_EXPORT CellBlock* dlrm_read_csv(const char* text, int64_t size, int64_t delimiter,
                                     int64_t quote, int64_t longest_line, int64_t width,
                                     const uint8_t* keep) {
  CellBlock* block = new_block(width, keep);
  if (block == nullptr) return nullptr;
  const dlrm::host::CsvFormat format{static_cast<char>(delimiter), static_cast<int>(quote),
                                     longest_line};
  dlrm::host::CsvReader(text, size, format, *block).read();
  block->finish();
  return block;
}

// Reads a block of JSON lines; the names of columns each end with a line feed. See `dlrm_read_csv`.
DLRM_EXPORT CellBlock* dlrm_read_json(const char* text, int64_t size, const char* names,
                                      int64_t width, const uint8_t* keep) {
  CellBlock* block = new_block(width, keep);
  if (block == nullptr) return nullptr;
  dlrm::host::JsonReader(text, size, names, *block).read();
  block->finish();
  return block;
}

// Writes the outcome of a block, its rows, its lines, its columns, and the bytes of their names.
DLRM_EXPORT void dlrm_cells_facts(const CellBlock* block, int64_t* facts) {
  const int64_t all[] = {static_cast<int64_t>(block->outcome), block->lines.size, block->num_lines,
                         block->columns.size, block->names.size};
  std::copy(std::begin(all), std::end(all), facts);
}

// Copies the lines of the rows, and the names of the columns, which each end with a line feed.
DLRM_EXPORT void dlrm_cells_rows(const CellBlock* block, int64_t* lines, char* names) {
  std::copy(block->lines.begin(), block->lines.end(), lines);
  std::copy(block->names.begin(), block->names.end(), names);
}

// Writes the cells of each column, its texts, their bytes, and whether it keeps numbers,
// `[columns, 4]`.
DLRM_EXPORT void dlrm_column_facts(const CellBlock* block, int64_t* facts) {
  for (const dlrm::host::CellColumn& column : block->columns) {
    *facts++ = column.codes.size, *facts++ = column.ends.size, *facts++ = column.data.size;
    *facts++ = column.keep == dlrm::host::Keep::kNumbers;
  }
}

// Copies a column: indices, ends, bytes and tags of its texts; without indices and tags if it keeps
// all texts.
DLRM_EXPORT void dlrm_copy_column(const CellBlock* block, int64_t column, int32_t* codes,
                                  int32_t* ends, char* data, uint8_t* tags) {
  const dlrm::host::CellColumn& cells = block->columns[column];
  std::copy(cells.codes.begin(), cells.codes.end(), codes);
  std::copy(cells.ends.begin(), cells.ends.end(), ends);
  std::copy(cells.data.begin(), cells.data.end(), data);
  std::copy(cells.tags.begin(), cells.tags.end(), tags);
}

// Copies the numbers of a column that keeps them.
DLRM_EXPORT void dlrm_copy_numbers(const CellBlock* block, int64_t column, double* numbers) {
  const dlrm::host::CellColumn& cells = block->columns[column];
  std::copy(cells.numbers.begin(), cells.numbers.end(), numbers);
}

DLRM_EXPORT void dlrm_free_cells(CellBlock* block) {
  block->release();
  std::free(block);
}
