// The module dlrm._host: the work of preprocessing and serving per byte of a log. No torch.
//
// Functions take and return arrays of NumPy, and release the interpreter's lock while they work.
// The names of results are in dlrm/data/sources/native.py.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csv_block.h"
#include "half.h"
#include "id_lookup.h"
#include "json_block.h"
#include "log_parser.h"
#include "number_text.h"
#include "text_hash.h"

namespace py = pybind11;

namespace {

using namespace dlrm::host;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename Work>
auto without_lock(const Work& work) {
  py::gil_scoped_release released;
  return work();
}

void expect_size(const char* name, const py::array& array, int64_t size) {
  if (array.size() != size) {
    throw py::value_error("sizes do not fit: expected " + std::to_string(size) + " " + name +
                          ", got " + std::to_string(array.size()));
  }
}

// Returns a vector as an array, without a copy.
template <typename T>
py::array_t<T> owned(std::vector<T> vector) {
  auto* kept = new std::vector<T>(std::move(vector));
  py::capsule owner(kept, [](void* pointer) { delete static_cast<std::vector<T>*>(pointer); });
  return py::array_t<T>(kept->size(), kept->data(), owner);
}

// Returns labels, integers, hashes, missing, rows, and the start of the first bad line or None.
// Arrays have room for all lines; those after `rows` are without meaning.
py::tuple lines_of(const py::bytes& bytes, int64_t num_numerical, int64_t num_categorical,
                   bool labeled) {
  const std::string_view text = bytes;
  const char *begin = text.data(), *end = begin + text.size();
  const int64_t rows = without_lock([&] { return count_lines(begin, end); });
  Array<bool> labels(rows);
  Array<int64_t> integers({num_numerical, rows});
  Array<uint64_t> hashes({num_categorical, rows});
  Array<bool> missing({num_numerical + num_categorical, rows});
  ParsedLines lines{num_numerical,
                    num_categorical,
                    labeled,
                    rows,
                    labels.mutable_data(),
                    integers.mutable_data(),
                    hashes.mutable_data(),
                    missing.mutable_data()};
  const char* stopped = without_lock([&] { return parse_lines(begin, end, lines); });
  std::optional<int64_t> bad_at;
  if (stopped != end) bad_at = stopped - begin;
  return py::make_tuple(labels, integers, hashes, missing, lines.parsed, bad_at);
}

// Returns the ids of numbers in the table of an `IdLookup`.
template <typename Id>
Array<Id> ids_of(const Array<uint64_t>& numbers, const Array<bool>& missing,
                 const Array<uint64_t>& hashes, const Array<Id>& ids,
                 const Array<int64_t>& directory) {
  expect_size("values of missing", missing, numbers.size());
  Array<Id> found(numbers.size());
  const IdTable<Id> table(hashes.data(), ids.data(), directory.data(), directory.size());
  const uint64_t* of_rows = numbers.data();
  const bool* are_missing = missing.data();
  Id* output = found.mutable_data();
  without_lock(
      [&, rows = numbers.size()] { look_up(table, rows, of_rows, are_missing, output, 1); });
  return found;
}

// Returns `function(begin, end)` of each text `data[starts[i]:ends[i]]`.
template <typename Result, typename Function>
Array<Result> of_texts(const Array<uint8_t>& data, const Array<int64_t>& starts,
                       const Array<int64_t>& ends, const Function& function) {
  const int64_t rows = starts.size(), size = data.size();
  expect_size("ends", ends, rows);
  Array<Result> results(rows);
  const uint8_t* bytes = data.data();
  const int64_t *begin = starts.data(), *end = ends.data();
  Result* output = results.mutable_data();
  const bool within = without_lock([&] {
    for (int64_t i = 0; i < rows; ++i) {
      if (begin[i] < 0 || begin[i] > end[i] || end[i] > size) return false;
      output[i] = function(bytes + begin[i], bytes + end[i]);
    }
    return true;
  });
  if (!within) {
    throw py::value_error("sizes do not fit: expected texts within " + std::to_string(size) +
                          " bytes");
  }
  return results;
}

Array<uint64_t> hash_texts(const Array<uint8_t>& data, const Array<int64_t>& starts,
                           const Array<int64_t>& ends) {
  return of_texts<uint64_t>(data, starts, ends, [](const uint8_t* begin, const uint8_t* end) {
    return hash_text(begin, end - begin);
  });
}

// Returns the numbers of texts, NaN for those of other texts than usual numbers.
Array<double> numbers_of(const Array<uint8_t>& data, const Array<int64_t>& starts,
                         const Array<int64_t>& ends) {
  return of_texts<double>(data, starts, ends, [](const uint8_t* begin, const uint8_t* end) {
    const auto *first = reinterpret_cast<const char*>(begin),
               *last = reinterpret_cast<const char*>(end);
    double number;
    return read_double(first, last, &number) ? number : std::numeric_limits<double>::quiet_NaN();
  });
}

// Returns the numbers of texts of hexadecimal digits, and a mask of other texts.
py::tuple hexadecimals_of(const Array<uint8_t>& data, const Array<int64_t>& starts,
                          const Array<int64_t>& ends) {
  Array<bool> bad(starts.size());
  bool* next = bad.mutable_data();
  auto numbers =
      of_texts<uint64_t>(data, starts, ends, [&next](const uint8_t* begin, const uint8_t* end) {
        const auto *p = reinterpret_cast<const char*>(begin),
                   *last = reinterpret_cast<const char*>(end);
        uint64_t number;
        bool missing;
        *next++ = !read_hash(p, last, &number, &missing) || p != last;
        return number;
      });
  return py::make_tuple(numbers, bad);
}

// Returns float32 as float16, for which NumPy takes ten times as long.
py::array halves_of(const Array<float>& values) {
  const py::dtype half("e");
  if (!has_half()) return values.attr("astype")(half);
  py::array halves(half, std::vector<py::ssize_t>(values.shape(), values.shape() + values.ndim()));
  const float* from = values.data();
  auto* to = static_cast<uint16_t*>(halves.mutable_data());
  without_lock([&, size = values.size()] { to_half(from, size, to); });
  return halves;
}

py::object column_of(CellColumn column) {
  switch (column.keep) {
    case Keep::kNumbers:
      return owned(std::move(column.numbers));
    case Keep::kTexts:
    case Keep::kDistinct:
      return py::make_tuple(
          column.keep == Keep::kTexts ? py::none() : py::object(owned(std::move(column.codes))),
          owned(std::move(column.offsets)), owned(std::move(column.data)),
          owned(std::move(column.tags)));
    default:
      return py::none();
  }
}

// Returns a block of cells. It is read once more if columns of numbers have other cells, which are
// then kept as `otherwise` says.
template <typename Read>
CellBlock block_of(std::vector<uint8_t> keep, Keep otherwise, const Read& read) {
  return without_lock([&] {
    while (true) {
      CellBlock found(keep);
      read(found);
      bool again = false;
      for (size_t i = 0; found.outcome != Outcome::kUndecided && i < keep.size(); ++i) {
        if (keep[i] == static_cast<uint8_t>(found.columns[i].keep)) continue;
        keep[i] = static_cast<uint8_t>(otherwise), again = true;
      }
      if (!again) return found;
    }
  });
}

py::list columns_of(CellBlock& block, size_t count) {
  py::list columns;
  for (size_t i = 0; i < count; ++i) columns.append(column_of(std::move(block.columns[i])));
  return columns;
}

// Returns what `CsvBlock` has. Characters are numbers, of which -1 is none.
py::tuple read_csv(const py::bytes& bytes, int delimiter, int quote, int escape, bool plain,
                   bool lines, bool last, const std::vector<uint8_t>& keep) {
  const std::string_view text = bytes;
  const CsvFormat format{static_cast<char>(delimiter), quote, escape, plain, lines, last};
  CellBlock block = block_of(keep, Keep::kTexts,
                             [&](CellBlock& block) { CsvReader(text, format, block).read(); });
  py::list bad;
  for (const BadRow& row : block.bad) bad.append(py::make_tuple(row.row, row.cells, row.text));
  const auto spans = py::make_tuple(block.span_rows, block.span_lines, block.first_span);
  return py::make_tuple(static_cast<int>(block.outcome), owned(std::move(block.lines)),
                        block.num_lines, columns_of(block, keep.size()), block.consumed,
                        block.failed_lines, block.blank, bad, spans);
}

// Returns what `CsvHead` has.
py::tuple read_csv_head(const py::bytes& bytes, int delimiter, int quote, int escape, bool last) {
  const std::string_view text = bytes;
  CellBlock block({});
  CsvReader reader(text, {static_cast<char>(delimiter), quote, escape, false, false, last}, block);
  py::list cells;
  for (const std::string& cell : reader.read_first()) cells.append(py::str(cell));
  return py::make_tuple(static_cast<int>(block.outcome), cells, block.num_lines, block.consumed,
                        block.failed_lines);
}

// Returns what `TextBlock` has.
py::tuple read_json(const py::bytes& bytes, const std::vector<std::string>& names,
                    const std::vector<uint8_t>& keep) {
  if (names.size() != keep.size()) throw py::value_error("expected as many names as columns");
  const std::string_view text = bytes;
  CellBlock block = block_of(keep, Keep::kDistinct,
                             [&](CellBlock& block) { JsonReader(text, names, block).read(); });
  const bool decided = block.outcome == Outcome::kRows;
  return py::make_tuple(decided, owned(std::move(block.lines)), block.num_lines, block.names,
                        columns_of(block, decided ? keep.size() : 0));
}

}  // namespace

PYBIND11_MODULE(_host, module) {
  // Arrays of another type are refused, not converted.
  const auto exact = [](const char* name) { return py::arg(name).noconvert(); };

  module.def("parse_lines", &lines_of);
  const auto define_look_up = [&](auto* function) {
    module.def("look_up", function, exact("numbers"), exact("missing"), exact("hashes"),
               exact("ids"), exact("directory"));
  };
  define_look_up(&ids_of<int8_t>);
  define_look_up(&ids_of<int16_t>);
  define_look_up(&ids_of<int32_t>);
  module.def("hash_texts", &hash_texts, exact("data"), exact("starts"), exact("ends"));
  module.def("numbers_of", &numbers_of, exact("data"), exact("starts"), exact("ends"));
  module.def("hexadecimals_of", &hexadecimals_of, exact("data"), exact("starts"), exact("ends"));
  module.def("to_half", &halves_of, exact("values"));
  module.def("read_csv", &read_csv);
  module.def("read_csv_head", &read_csv_head);
  module.def("read_json", &read_json);
}
