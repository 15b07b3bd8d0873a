// Maps an id to a row of the weight; bad ids are reported, and row 0 is read instead.
#pragma once

#include "../joint_embedding.h"
#include "errors.h"

namespace dlrm {

struct TableRows {
  TableRanges ranges;
  int64_t total_rows;

  // Returns a row of the weight. One thread looks it up, and reports a bad id.
  __device__ int64_t row(int64_t id, int64_t table, int64_t batch_row, int64_t position,
                         const Errors& errors) const {
    const int64_t first = ranges.begins[table], end = ranges.ends[table];
    if (first >= 0 && end >= first && end <= total_rows) {
      if (id >= 0 && id < end - first) return first + id;
      errors.report({kBadId, position, table, batch_row, id, end - first});
    } else {
      const bool at_first = first < 0 || first > total_rows;
      errors.report({kBadOffset, position, at_first ? table : ranges.ends - ranges.begins + table,
                     batch_row, at_first ? first : end, total_rows});
    }
    return 0;
  }
};

}  // namespace dlrm
