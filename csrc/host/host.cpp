// The Python module dlrm._host: what preprocessing does to every byte of a log. No torch.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "id_lookup.h"
#include "log_parser.h"

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// Parses the lines of a text up to the first that cannot be read, and says where that one starts.
py::tuple parse_lines(const py::buffer& text, py::ssize_t num_numerical,
                      py::ssize_t num_categorical, bool labelled) {
  const py::buffer_info info = text.request();
  if (info.itemsize != 1 || info.ndim != 1) {
    throw py::value_error("text: expected bytes in one piece");
  }
  const char* begin = static_cast<const char*>(info.ptr);
  const char* end = begin + info.size;
  py::ssize_t rows;
  {
    py::gil_scoped_release release;
    rows = dlrm::host::count_lines(begin, end);
  }
  Array<bool> labels(rows);
  Array<int64_t> integers({num_numerical, rows});
  Array<uint64_t> hashes({num_categorical, rows});
  Array<bool> missing({num_numerical + num_categorical, rows});
  dlrm::host::ParsedLines lines{
      num_numerical,
      num_categorical,
      labelled,
      rows,
      reinterpret_cast<uint8_t*>(labels.mutable_data()),
      integers.mutable_data(),
      hashes.mutable_data(),
      reinterpret_cast<uint8_t*>(missing.mutable_data()),
  };
  const char* stopped;
  {
    py::gil_scoped_release release;
    stopped = dlrm::host::parse_lines(begin, end, lines);
  }
  const py::object bad = stopped == end ? py::object(py::none()) : py::int_(stopped - begin);
  return py::make_tuple(labels, integers, hashes, missing, lines.parsed, bad);
}

template <typename Id>
void look_up(const Array<uint64_t>& values, const Array<bool>& missing,
             const Array<uint64_t>& hashes, const Array<int64_t>& directory, const Array<Id>& ids,
             Array<Id> output) {
  const py::ssize_t rows = values.size();
  if (missing.size() != rows || output.size() != rows || ids.size() != hashes.size() ||
      directory.size() < 2) {
    throw py::value_error("look_up: sizes do not fit together");
  }
  const dlrm::host::IdTable<Id> table(hashes.data(), ids.data(), directory.data(),
                                      directory.size());
  const uint64_t* value = values.data();
  const bool* absent = missing.data();
  Id* out = output.mutable_data();
  py::gil_scoped_release release;
  for (py::ssize_t row = 0; row < rows; ++row) {
    out[row] = absent[row] ? Id{0} : table.find(value[row]);
  }
}

}  // namespace

PYBIND11_MODULE(_host, module) {
  module.def("parse_lines", &parse_lines, py::arg("text"), py::arg("num_numerical"),
             py::arg("num_categorical"), py::arg("labelled"));
  // Arrays are taken as they are: a conversion would copy, and write the ids into the copy.
  const auto define = [&module](auto function) {
    module.def("look_up", function, py::arg("values").noconvert(), py::arg("missing").noconvert(),
               py::arg("hashes").noconvert(), py::arg("directory").noconvert(),
               py::arg("ids").noconvert(), py::arg("output").noconvert());
  };
  define(&look_up<int8_t>);
  define(&look_up<int16_t>);
  define(&look_up<int32_t>);
}
