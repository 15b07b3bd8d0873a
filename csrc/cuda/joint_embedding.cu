#include <torch/csrc/stable/library.h>

#include "../joint_embedding.h"
#include "table_rows.h"
#include "vectors.h"

namespace dlrm {
namespace {

constexpr int kGatherThreads = 256;
constexpr int kGatherBlocks = 4;  // of a multiprocessor: enough, and none spills registers
constexpr int kLookUps = 4;       // of a group of threads, whose rows are all on the way at once

// A block owns kLookUps look-ups for each of its groups of threads. It reads their ids once, a
// thread each, and puts their rows into shared memory; then a group owns every blockDim.y-th of
// them, and each of its threads every blockDim.x-th vector of their rows. Rows are read and outputs
// written once, 16 bytes a thread where rows are aligned.
template <typename weight_t, typename output_t, int kVector>
__global__ void __launch_bounds__(kGatherThreads, kGatherBlocks)
    gather_rows(const weight_t* weight, Integers ids, TableRows table_rows, int64_t look_ups,
                int64_t tables, int64_t dim, output_t* output, Errors errors) {
  const int most = blockDim.y * kLookUps;
  const int64_t first = int64_t{blockIdx.x} * most;
  const int count = static_cast<int>(min(int64_t{most}, look_ups - first));
  auto* rows = reinterpret_cast<int64_t*>(shared_memory());  // where they begin in the weight
  for (int k = threadIdx.y * blockDim.x + threadIdx.x; k < count; k += kGatherThreads) {
    const int64_t i = first + k;
    rows[k] = dim * table_rows.row(ids[i], i % tables, i / tables, i, errors);
  }
  __syncthreads();
  for (int64_t column = threadIdx.x * kVector; column < dim; column += blockDim.x * kVector) {
    Elements<weight_t, kVector> vectors[kLookUps];
    // Without a branch: the compiler would wait for a row there. The last may be read repeatedly.
#pragma unroll
    for (int k = 0; k < kLookUps; ++k) {
      const int64_t row = rows[min(static_cast<int>(threadIdx.y + k * blockDim.y), count - 1)];
      if (table_rows.total_rows > 0) {
        vectors[k].load(weight + row + column);
      } else {
        vectors[k].clear();
      }
    }
#pragma unroll
    for (int k = 0; k < kLookUps; ++k) {
      const int i = threadIdx.y + k * blockDim.y;
      if (i >= count) break;
      output_t* to = output + (first + i) * dim + column;
      if constexpr (std::is_same_v<weight_t, output_t>) {
        vectors[k].store(to);
      } else {
        float values[kVector];
        vectors[k].get(values);
        Elements<output_t, kVector> cast;
        cast.set(values);
        cast.store(to);
      }
    }
  }
}

template <typename weight_t, typename output_t, int kVector>
void gather(const Launcher& launch, const JointEmbeddingInputs& inputs, output_t* output) {
  const Groups groups(inputs.dim / kVector, kGatherThreads);
  const int64_t look_ups = inputs.batch * inputs.tables;
  const TableRows table_rows{TableRanges(inputs.table_offsets), inputs.total_rows};
  const int64_t of_block = int64_t{groups.threads.y} * kLookUps;
  launch(gather_rows<weight_t, output_t, kVector>, ceil_div(look_ups, of_block), groups.threads,
         of_block * sizeof(int64_t), inputs.weight.const_data_ptr<weight_t>(), Integers(inputs.ids),
         table_rows, look_ups, inputs.tables, inputs.dim, output, Errors(launch, kJointEmbedding));
}

Tensor joint_embedding(const Tensor& weight, const Tensor& ids, const Tensor& table_offsets,
                       std::optional<ScalarType> dtype) {
  const JointEmbeddingInputs inputs(weight, ids, table_offsets, dtype);
  const Launcher launch(kLookUp, inputs.weight);
  Tensor output = torch::stable::new_empty(inputs.weight, {inputs.batch, inputs.tables, inputs.dim},
                                           inputs.output_dtype);
  dispatch_floating(inputs.weight.scalar_type(), [&]<typename weight_t>() {
    dispatch_floating(inputs.output_dtype, [&]<typename output_t>() {
      constexpr int kVector = kElementsOf16Bytes<weight_t>;
      auto* output_data = output.mutable_data_ptr<output_t>();
      if (inputs.dim % kVector == 0 && is_aligned(inputs.weight.const_data_ptr<weight_t>()) &&
          is_aligned(output_data)) {
        gather<weight_t, output_t, kVector>(launch, inputs, output_data);
      } else {
        gather<weight_t, output_t, 1>(launch, inputs, output_data);
      }
    });
  });
  return output;
}

}  // namespace
}  // namespace dlrm

DLRM_CUDA_IMPL(m) { m.impl("joint_embedding", TORCH_BOX(&dlrm::joint_embedding)); }
