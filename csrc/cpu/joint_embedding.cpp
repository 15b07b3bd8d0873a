#include "../joint_embedding.h"

#include <torch/csrc/stable/library.h>

#include "first_bad.h"
#include "isa.h"
#include "network.h"

#define DLRM_KERNELS "joint_embedding_kernels.h"
#include "for_each_isa.h"

namespace dlrm {
namespace {

constexpr int64_t kElementsPerTask = 32768;

}  // namespace

Tensor joint_embedding(const Tensor& weight, const Tensor& ids, const Tensor& table_offsets,
                       std::optional<ScalarType> dtype) {
  const JointEmbeddingInputs inputs(weight, ids, table_offsets, dtype);
  const int64_t batch = inputs.batch, tables = inputs.tables, dim = inputs.dim;
  const TableRanges ranges(inputs.table_offsets);
  check_table_offsets("joint_embedding", ranges, tables, inputs.total_rows);
  Tensor output = allocate(inputs.weight, {batch, tables, dim}, inputs.output_dtype);
  FirstBad bad;
  dispatch_floating(inputs.weight.scalar_type(), [&]<typename weight_t>() {
    dispatch_floating(inputs.output_dtype, [&]<typename output_t>() {
      dispatch_id(inputs.ids.scalar_type(), [&]<typename id_t>() {
        const auto* weight_data = inputs.weight.const_data_ptr<weight_t>();
        const auto* ids_data = inputs.ids.const_data_ptr<id_t>();
        auto* output_data = output.mutable_data_ptr<output_t>();
        const int64_t row_bytes = dim * sizeof(output_t);
        const bool stream = batch * tables * row_bytes >= kStreamBytes && row_bytes % 64 == 0 &&
                            reinterpret_cast<uintptr_t>(output_data) % 64 == 0;
        const auto gather = stream ? DLRM_KERNEL(gather_rows<weight_t, output_t, id_t, true>)
                                   : DLRM_KERNEL(gather_rows<weight_t, output_t, id_t, false>);
        torch::stable::parallel_for(0, batch * tables, std::max<int64_t>(1, kElementsPerTask / dim),
                                    [&](int64_t begin, int64_t end) {
                                      const int64_t position =
                                          gather(weight_data, ids_data, ranges, tables, dim,
                                                 output_data, begin, end);
                                      if (position >= 0) bad.report(position);
                                    });
        if (bad.any()) {
          const int64_t table = bad.position() % tables;
          fail("joint_embedding: id ", int64_t{ids_data[bad.position()]}, " of table ", table,
               " in batch row ", bad.position() / tables, ": expected 0 <= id < ",
               ranges.ends[table] - ranges.begins[table]);
        }
      });
    });
  });
  return output;
}

namespace {

// The rows of the weight that ids look up, [1, batch * tables].
Tensor joint_embedding_rows(const Tensor& ids_, const Tensor& table_offsets_) {
  const Tensor ids = as_contiguous(ids_);
  const Tensor table_offsets = as_contiguous(table_offsets_);
  DLRM_CHECK(
      ids.dim() == 2 && is_id(ids.scalar_type()) && TableRanges::may_be(table_offsets, ids.size(1)),
      "joint_embedding_rows: expected ids [batch, tables] and table_offsets [tables + 1] ",
      "Long, got ", shape_of(ids), " ", dtype_of(ids), " and ", shape_of(table_offsets), " ",
      dtype_of(table_offsets));
  const int64_t batch = ids.size(0), tables = ids.size(1);
  Tensor rows = allocate(ids, {1, batch * tables}, ScalarType::Long);
  const int64_t* offsets = TableRanges(table_offsets).begins;
  auto* row = rows.mutable_data_ptr<int64_t>();
  dispatch_id(ids.scalar_type(), [&]<typename id_t>() {
    const auto* id = ids.const_data_ptr<id_t>();
    torch::stable::parallel_for(
        0, batch, std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, tables)),
        [&](int64_t begin, int64_t end) {
          for (int64_t sample = begin; sample < end; ++sample) {
            const int64_t first = sample * tables;
            for (int64_t t = 0; t < tables; ++t) row[first + t] = offsets[t] + id[first + t];
          }
        });
  });
  return rows;
}

}  // namespace
}  // namespace dlrm

STABLE_TORCH_LIBRARY_IMPL(dlrm, CPU, m) {
  m.impl("joint_embedding", TORCH_BOX(&dlrm::joint_embedding));
  m.impl("joint_embedding_rows", TORCH_BOX(&dlrm::joint_embedding_rows));
}
