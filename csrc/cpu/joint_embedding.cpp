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
  ranges.check(tables, inputs.total_rows);
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
        if (bad.any()) ranges.fail_for(ids_data[bad.position()], bad.position(), tables);
      });
    });
  });
  return output;
}

}  // namespace dlrm

STABLE_TORCH_LIBRARY_IMPL(dlrm, CPU, m) {
  m.impl("joint_embedding", TORCH_BOX(&dlrm::joint_embedding));
}
