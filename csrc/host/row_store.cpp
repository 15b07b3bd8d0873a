// The plain C interface of `RowStore`; dlrm/store/native.py is its only caller.
#include "row_store.h"

#define DLRM_EXPORT extern "C" __attribute__((visibility("default")))

using dlrm::host::Counters;
using dlrm::host::Field;
using dlrm::host::Problem;
using dlrm::host::RecordLayout;
using dlrm::host::RowStore;

DLRM_EXPORT RowStore* dlrm_store_open(int64_t file, int64_t records, int64_t slots,
                                      const Field* fields, int64_t num_fields, int64_t threads) {
  return new RowStore(static_cast<int>(file), records, slots, fields, num_fields, threads);
}

DLRM_EXPORT void dlrm_store_close(RowStore* store) { delete store; }

// Bytes of a file of so many records of `payload` bytes; `*record` is what one takes of them.
DLRM_EXPORT int64_t dlrm_store_file_bytes(int64_t payload, int64_t records, int64_t* record) {
  const RecordLayout layout(payload);
  *record = layout.bytes;
  return layout.file_bytes(records);
}

DLRM_EXPORT int64_t dlrm_store_prepare(RowStore* store, const int64_t* records, int64_t count,
                                       int64_t reserve, int64_t* slots, int64_t* ticket) {
  return store->prepare(records, count, reserve, slots, ticket);
}

DLRM_EXPORT void dlrm_store_mark(RowStore* store, int64_t ticket) { store->mark(ticket); }

DLRM_EXPORT void dlrm_store_release(RowStore* store, int64_t ticket) { store->release(ticket); }

DLRM_EXPORT int64_t dlrm_store_flush(RowStore* store) { return store->flush(); }

DLRM_EXPORT void dlrm_store_begin(RowStore* store, int64_t undo, int64_t size, int64_t generation) {
  store->begin(static_cast<int>(undo), size, static_cast<uint32_t>(generation));
}

DLRM_EXPORT int64_t dlrm_store_fill(RowStore* store, int64_t first, int64_t count,
                                    const char* const* data) {
  return store->fill(first, count, data);
}

DLRM_EXPORT int64_t dlrm_store_read(RowStore* store, int64_t first, int64_t count, char* output) {
  return store->read_range(first, count, output);
}

DLRM_EXPORT void dlrm_store_look_back(RowStore* store, int64_t generation) {
  store->look_back(static_cast<uint32_t>(generation));
}

DLRM_EXPORT void dlrm_store_overlay(RowStore* store, int64_t undo, int64_t count,
                                    const int64_t* records, const int64_t* offsets) {
  store->add_overlay(static_cast<int>(undo), count, records, offsets);
}

DLRM_EXPORT void dlrm_store_forget(RowStore* store) { store->forget(); }

DLRM_EXPORT int64_t dlrm_store_restore(RowStore* store, int64_t undo, int64_t count,
                                       const int64_t* records, const int64_t* offsets) {
  return store->restore(static_cast<int>(undo), count, records, offsets);
}

DLRM_EXPORT void dlrm_store_problem(RowStore* store, Problem* problem) {
  *problem = store->problem();
}

DLRM_EXPORT void dlrm_store_counters(RowStore* store, Counters* counters) {
  *counters = store->counters();
}
