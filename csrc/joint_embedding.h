// Sizes and checks of one joint_embedding call, for every backend.
#pragma once

#include <optional>

#include "tensors.h"

namespace dlrm {

// Where the rows of each table begin and end in the weight.
struct TableRanges {
  const int64_t* begins;
  const int64_t* ends;

  // `offsets` are [tables + 1] or, where tables may have the same rows, [2, tables].
  explicit TableRanges(const Tensor& offsets)
      : begins(offsets.const_data_ptr<int64_t>()),
        ends(begins + (offsets.dim() == 2 ? offsets.size(1) : 1)) {}

  static bool may_be(const Tensor& offsets, int64_t tables) {
    const bool one_by_one = offsets.dim() == 1 && offsets.size(0) == tables + 1;
    const bool apart = offsets.dim() == 2 && offsets.size(0) == 2 && offsets.size(1) == tables;
    return offsets.scalar_type() == ScalarType::Long && (one_by_one || apart);
  }

  int64_t place_of_end(int64_t table) const { return ends - begins + table; }
};

struct JointEmbeddingInputs {
  int64_t batch;
  int64_t tables;
  int64_t dim;
  int64_t total_rows;
  Tensor weight;         // [total_rows, dim], contiguous
  Tensor ids;            // [batch, tables], contiguous
  Tensor table_offsets;  // see TableRanges; contiguous
  ScalarType output_dtype;

  JointEmbeddingInputs(const Tensor& weight_, const Tensor& ids_, const Tensor& table_offsets_,
                       std::optional<ScalarType> dtype) {
    DLRM_CHECK(weight_.dim() == 2 && weight_.size(1) > 0 && is_floating(weight_.scalar_type()),
               "joint_embedding: expected weight [rows, dim > 0] of Float, BFloat16 or Half, got ",
               shape_of(weight_), " ", dtype_of(weight_));
    DLRM_CHECK(ids_.dim() == 2 && is_id(ids_.scalar_type()),
               "joint_embedding: expected ids [batch, tables] of Char, Short, Int or Long, got ",
               shape_of(ids_), " ", dtype_of(ids_));
    DLRM_CHECK(TableRanges::may_be(table_offsets_, ids_.size(1)),
               "joint_embedding: expected table_offsets [", ids_.size(1) + 1, "] Long for ids ",
               shape_of(ids_), ", got ", shape_of(table_offsets_), " ", dtype_of(table_offsets_));
    DLRM_CHECK(weight_.device() == ids_.device() && weight_.device() == table_offsets_.device(),
               "joint_embedding: weight, ids and table_offsets are not all on one device");
    output_dtype = dtype.value_or(weight_.scalar_type());
    DLRM_CHECK(is_floating(output_dtype),
               "joint_embedding: expected dtype Float, BFloat16 or Half, got ",
               torch::headeronly::toString(output_dtype));
    batch = ids_.size(0);
    tables = ids_.size(1);
    dim = weight_.size(1);
    total_rows = weight_.size(0);
    weight = as_contiguous(weight_);
    ids = as_contiguous(ids_);
    table_offsets = as_contiguous(table_offsets_);
  }
};

// The offsets are readable here: on the host.
inline void check_table_offsets(const char* name, const TableRanges& ranges, int64_t tables,
                                int64_t total_rows) {
  const auto check = [&](int64_t place, int64_t least) {
    const int64_t offset = ranges.begins[place];
    DLRM_CHECK(offset >= least && offset <= total_rows, name, ": table_offsets[", place,
               "] = ", offset, ": expected offsets that do not fall, within the weight's ",
               total_rows, " rows");
  };
  for (int64_t t = 0; t < tables; ++t) {
    check(t, 0);
    check(ranges.place_of_end(t), ranges.begins[t]);
  }
}

}  // namespace dlrm
