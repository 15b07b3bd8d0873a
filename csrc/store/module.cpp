// The Python module dlrm.store._row_store: `NativeStore`, whose buffers are NumPy arrays. Calls
// that may wait, for the disk or for each other, release the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "row_store.h"

namespace py = pybind11;

namespace {

using dlrm::store::RecordLayout;
using dlrm::store::RowStore;
using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Numbers = py::array_t<int64_t, py::array::c_style>;
using Released = py::call_guard<py::gil_scoped_release>;

void check(bool holds, const char* expected) {
  if (!holds) throw std::invalid_argument(expected);
}

std::unique_ptr<RowStore> open_store(int file, int64_t records, int64_t slots,
                                     std::vector<std::pair<std::optional<Bytes>, int64_t>> fields,
                                     int64_t threads) {
  std::vector<dlrm::store::Field> views;
  for (auto& [data, bytes] : fields) {
    check(!data || data->size() == slots * bytes, "expected a row of each field a slot");
    views.push_back({data ? reinterpret_cast<char*>(data->mutable_data()) : nullptr, bytes});
  }
  return std::make_unique<RowStore>(file, records, slots, std::move(views), threads);
}

std::pair<Numbers, int64_t> prepare(RowStore& store, const Numbers& records, int64_t reserve) {
  Numbers slots(records.size());
  int64_t* output = slots.mutable_data();
  int64_t ticket;
  {
    const py::gil_scoped_release released;
    ticket = store.prepare(records.data(), records.size(), reserve, output);
  }
  return {std::move(slots), ticket};
}

void fill_rows(RowStore& store, int64_t first, int64_t count,
               const std::vector<std::optional<Bytes>>& data) {
  std::vector<const char*> pointers;
  check(data.size() == store.fields().size(), "expected data of each field, or None");
  for (size_t i = 0; i < data.size(); ++i) {
    check(!data[i] || data[i]->size() == count * store.fields()[i].bytes, "expected whole rows");
    pointers.push_back(data[i] ? reinterpret_cast<const char*>(data[i]->data()) : nullptr);
  }
  store.fill(first, count, pointers);
}

void read_rows(RowStore& store, int64_t first, py::array output) {
  check(output.itemsize() == store.layout().payload, "expected an item of all fields a record");
  auto* data = static_cast<char*>(output.mutable_data());
  const py::gil_scoped_release released;
  store.read_range(first, output.size(), data);
}

// Calls a method with records and the offsets of their content in a file.
template <auto method>
void with_content(RowStore& store, int file, const Numbers& records, const Numbers& offsets) {
  check(records.size() == offsets.size(), "expected an offset a record");
  (store.*method)(file, records.size(), records.data(), offsets.data());
}

py::dict counters(RowStore& store) {
  const auto found = store.counters();
  return py::dict(py::arg("reads") = found.reads, py::arg("writes") = found.writes,
                  py::arg("undone") = found.undone, py::arg("hits") = found.hits,
                  py::arg("dirty") = found.dirty);
}

// Raises an exception of dlrm/store/native.py.
template <typename... Arguments>
void raise(const char* name, Arguments... arguments) {
  const py::object type = py::module_::import("dlrm.store.native").attr(name);
  PyErr_SetObject(type.ptr(), py::make_tuple(arguments...).ptr());
}

void translate(std::exception_ptr thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const dlrm::store::Full& full) {
    raise("FullError", full.needed, full.held);
  } catch (const dlrm::store::Damaged& damaged) {
    raise("DamagedError", damaged.record, damaged.undo);
  } catch (const dlrm::store::DiskError& error) {
    raise("DiskError", error.error, error.undo);
  }
}

}  // namespace

PYBIND11_MODULE(_row_store, module) {
  py::register_local_exception_translator(translate);
  py::class_<RowStore>(module, "NativeStore")
      // The arrays of the fields live as long as the store.
      .def(py::init(&open_store), py::arg("file"), py::arg("records"), py::arg("slots"),
           py::arg("fields").noconvert(), py::arg("threads"), py::keep_alive<1, 5>())
      .def_static("record_bytes", [](int64_t payload) { return RecordLayout(payload).bytes; })
      .def_static("file_bytes",
                  [](int64_t payload, int64_t records) {
                    return RecordLayout(payload).file_bytes(records);
                  })
      .def("prepare", &prepare, py::arg("records").noconvert(), py::arg("reserve"))
      .def("mark", &RowStore::mark, Released())
      .def("release", &RowStore::release, Released())
      .def("flush", &RowStore::flush, Released())
      .def("begin", &RowStore::begin, Released())
      .def("fill", &fill_rows, py::arg("first"), py::arg("count"), py::arg("data").noconvert(),
           Released())
      .def("read", &read_rows)
      .def("look_back", &RowStore::look_back, Released())
      .def("overlay", &with_content<&RowStore::add_overlay>, Released())
      .def("restore", &with_content<&RowStore::restore>, Released())
      .def("counters", &counters);
}
