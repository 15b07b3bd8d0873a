#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "../joint_embedding.h"
#include "errors.h"
#include "vectors.h"

namespace dlrm {
namespace {

// Maps an id to a row of the weight; bad ids are reported, and row 0 is read instead.
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

Tensor joint_embedding(const Tensor& weight, const Tensor& ids, const Tensor& table_offsets,
                       std::optional<ScalarType> dtype) {
  const JointEmbeddingInputs inputs(weight, ids, table_offsets, dtype);
  const Launcher launch(kLookUp, inputs.weight);
  const Errors errors(launch, kJointEmbedding);
  const int64_t look_ups = inputs.batch * inputs.tables;
  const TableRows rows{TableRanges(inputs.table_offsets), inputs.total_rows};
  Tensor output = torch::stable::new_empty(inputs.weight, {inputs.batch, inputs.tables, inputs.dim},
                                           inputs.output_dtype);
  dispatch_floating(inputs.weight.scalar_type(), [&]<typename weight_t>() {
    dispatch_floating(inputs.output_dtype, [&]<typename output_t>() {
      const auto* weight_data = inputs.weight.const_data_ptr<weight_t>();
      auto* output_data = output.mutable_data_ptr<output_t>();
      dispatch_vector<weight_t>(inputs.dim, {weight_data, output_data}, [&]<int kVector>() {
        const Groups groups(inputs.dim / kVector, kGatherThreads);
        const int64_t of_block = int64_t{groups.threads.y} * kLookUps;
        launch(gather_rows<weight_t, output_t, kVector>, ceil_div(look_ups, of_block),
               groups.threads, of_block * sizeof(int64_t), weight_data, Integers(inputs.ids), rows,
               look_ups, inputs.tables, inputs.dim, output_data, errors);
      });
    });
  });
  return output;
}

constexpr int kBagThreads = 256;
constexpr int kPooledAtOnce = 4;  // of a bag, that are on the way

// Of one launch's reports the first is kept: bad lengths come before their sum, and that before
// ids.
constexpr int64_t kBeforeSum = std::numeric_limits<int64_t>::min();
constexpr int64_t kBeforeIds = -1;

// A thread owns a bag: it reads its length once and writes it once, wide, or 0 where it is bad.
__global__ void __launch_bounds__(kBagThreads)
    check_lengths(Integers lengths, int64_t bags, int64_t tables, int64_t total, int64_t* checked,
                  Errors errors) {
  const int64_t bag = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (bag >= bags) return;
  const int64_t length = lengths[bag];
  const bool bad = length < 0 || length > total;
  if (bad) errors.report({kBadLength, kBeforeSum + bag, bag % tables, bag / tables, length, total});
  checked[bag] = bad ? 0 : length;
}

// One thread: compares the sum of the lengths with the number of ids.
__global__ void check_total(const int64_t* ends, int64_t bags, int64_t total, Errors errors) {
  const int64_t found = bags > 0 ? ends[bags - 1] : 0;
  if (found != total) errors.report({kBadTotal, kBeforeIds, 0, 0, found, total});
}

// Positions of each bag's ids, for any lengths.
struct BagEnds {
  const int64_t* ends;
  int64_t bags, total;

  __device__ int64_t begin(int64_t bag) const { return bag == 0 ? 0 : min(ends[bag - 1], total); }
  __device__ int64_t end(int64_t bag) const { return min(ends[bag], total); }
};

Tensor ends_of(const Launcher& launch, const BagLengths& bags, const Errors& errors) {
  Tensor checked =
      torch::stable::new_empty(bags.lengths, {bags.bags}, std::optional(ScalarType::Long));
  launch(check_lengths, ceil_div(bags.bags, kBagThreads), kBagThreads, 0, Integers(bags.lengths),
         bags.bags, bags.tables, bags.total, checked.mutable_data_ptr<int64_t>(), errors);
  Tensor ends = inclusive_sums(launch, checked);
  launch(check_total, 1, 1, 0, ends.const_data_ptr<int64_t>(), bags.bags, bags.total, errors);
  return ends;
}

// What an id's row is multiplied by, in a bag of `length`.
struct Factors {
  const float* sample_weights;  // or null
  bool mean;

  __device__ float of(int64_t i) const {
    return sample_weights == nullptr ? 1.0f : sample_weights[i];
  }
  __device__ float of_bag(int64_t length) const {
    return mean && length > 1 ? 1.0f / static_cast<float>(length) : 1.0f;
  }
};

// A group of threads owns a bag, and each of its threads every blockDim.x-th vector of the rows: it
// reads each id's row once and adds them up in the bag's order, and writes the output once. Ids are
// read blockDim.x at once, a thread each, so that several rows are on the way at once.
template <typename weight_t, typename output_t, int kVector>
__global__ void __launch_bounds__(kBagThreads)
    pool_bags(const weight_t* weight, Integers ids, Factors factors, BagEnds bags,
              TableRows table_rows, int64_t tables, int64_t dim, output_t* output, Errors errors) {
  const int64_t bag = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (bag >= bags.bags) return;
  const int width = blockDim.x, first_lane = threadIdx.y * width % kWarp;
  const unsigned group = lanes(first_lane, width);
  const int64_t begin = bags.begin(bag), end = bags.end(bag);
  const int64_t batch_row = bag / tables, table = bag % tables;
  for (int64_t first_column = 0; first_column < dim; first_column += width * kVector) {
    const int64_t column = first_column + threadIdx.x * kVector;
    const weight_t* from = weight + min(column, dim - kVector);
    float sums[kVector] = {};
    for (int64_t first = begin; first < end; first += width) {
      const int64_t i = first + threadIdx.x;
      int64_t row = 0;
      float factor = 0;
      if (i < end) {
        row = table_rows.row(ids[i], table, batch_row, i, errors);
        factor = factors.of(i);
      }
      __syncwarp(group);
      const int count =
          table_rows.total_rows == 0 ? 0 : static_cast<int>(min(int64_t{width}, end - first));
      // Without a branch: the compiler would load each row where it is added.
      for (int k = 0; k < count; k += kPooledAtOnce) {
        Elements<weight_t, kVector> elements[kPooledAtOnce];
        float their_factors[kPooledAtOnce];
#pragma unroll
        for (int r = 0; r < kPooledAtOnce; ++r) {
          const int lane = first_lane + min(k + r, count - 1);
          elements[r].load(from + __shfl_sync(group, row, lane) * dim);
          their_factors[r] = __shfl_sync(group, factor, lane);
        }
#pragma unroll
        for (int r = 0; r < kPooledAtOnce; ++r) {
          float values[kVector];
          elements[r].get(values);
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            const float sum = sums[e] + their_factors[r] * values[e];
            sums[e] = k + r < count ? sum : sums[e];
          }
        }
      }
    }
    if (column >= dim) continue;
    if (factors.mean && end - begin > 1) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) sums[k] /= static_cast<float>(end - begin);
    }
    Elements<output_t, kVector> elements;
    elements.set(sums);
    elements.store(output + bag * dim + column);
  }
}

// A group of threads owns a bag: it reads the bag's gradient once and writes it, scaled, once an
// id.
template <typename scalar_t, int kVector>
__global__ void __launch_bounds__(kBagThreads)
    spread_bags(const scalar_t* grad, Integers ids, Factors factors, BagEnds bags,
                const int64_t* table_offsets, int64_t tables, int64_t dim, int64_t* rows,
                scalar_t* values) {
  const int64_t bag = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (bag >= bags.bags) return;
  const int64_t begin = bags.begin(bag), end = bags.end(bag);
  const int64_t first_row = table_offsets[bag % tables];
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) rows[i] = first_row + ids[i];
  for (int64_t column = threadIdx.x * kVector; column < dim; column += blockDim.x * kVector) {
    Elements<scalar_t, kVector> elements;
    elements.load(grad + bag * dim + column);
    float gradient[kVector];
    elements.get(gradient);
    const float of_bag = factors.of_bag(end - begin);
#pragma unroll 1  // unrolled, it would not store 16 bytes at once
    for (int64_t i = begin; i < end; ++i) {
      const float factor = factors.of(i) * of_bag;
      float scaled[kVector];
#pragma unroll
      for (int k = 0; k < kVector; ++k) scaled[k] = factor * gradient[k];
      Elements<scalar_t, kVector> product;
      product.set(scaled);
      product.store(values + i * dim + column);
    }
  }
}

// A warp owns a bag: it reads its gradient and each id's row once, and writes their product once.
template <typename weight_t, typename grad_t>
__global__ void __launch_bounds__(kBagThreads)
    dot_bags(const weight_t* weight, const grad_t* grad, const int64_t* rows, BagEnds bags,
             int64_t total_rows, int64_t dim, bool mean, float* output, Errors errors) {
  const int64_t bag = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (bag >= bags.bags) return;
  const int64_t begin = bags.begin(bag), end = bags.end(bag);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = rows[i];
    const bool bad = row < 0 || row >= total_rows;
    if (bad && threadIdx.x == 0) errors.report({kBadRow, i, 0, 0, row, total_rows});
    float sum = 0;
    for (int64_t column = threadIdx.x; column < dim && !bad; column += kWarp) {
      sum += static_cast<float>(weight[row * dim + column]) *
             static_cast<float>(grad[bag * dim + column]);
    }
    for (int bit = kWarp / 2; bit > 0; bit /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, bit);
    if (threadIdx.x == 0) output[i] = mean ? sum / static_cast<float>(end - begin) : sum;
  }
}

Tensor joint_embedding_bag(const Tensor& weight_, const Tensor& ids, const Tensor& lengths,
                           const Tensor& table_offsets, std::optional<Tensor> sample_weights,
                           bool mean, std::optional<ScalarType> dtype) {
  const BagInputs inputs(ids, lengths, table_offsets, sample_weights);
  const Tensor weight = checked_weight(weight_, inputs.lengths);
  const ScalarType output_dtype = checked_dtype(dtype, weight);
  const int64_t tables = inputs.tables, dim = weight.size(1);
  const Launcher launch(kLookUp, weight);
  const Errors errors(launch, kJointEmbedding);
  const Tensor ends = ends_of(launch, inputs, errors);
  const BagEnds bags{ends.const_data_ptr<int64_t>(), inputs.bags, inputs.total};
  const TableRows rows{TableRanges(inputs.table_offsets), weight.size(0)};
  Tensor output = torch::stable::new_empty(weight, {inputs.batch, tables, dim}, output_dtype);
  dispatch_floating(weight.scalar_type(), [&]<typename weight_t>() {
    dispatch_floating(output_dtype, [&]<typename output_t>() {
      const auto* weight_data = weight.const_data_ptr<weight_t>();
      auto* output_data = output.mutable_data_ptr<output_t>();
      dispatch_vector<weight_t>(dim, {weight_data, output_data}, [&]<int kVector>() {
        const Groups groups(dim / kVector, kBagThreads);
        launch(pool_bags<weight_t, output_t, kVector>, ceil_div(inputs.bags, groups.threads.y),
               groups.threads, 0, weight_data, Integers(inputs.ids),
               Factors{inputs.factors(), mean}, bags, rows, tables, dim, output_data, errors);
      });
    });
  });
  return output;
}

std::tuple<Tensor, Tensor> joint_embedding_bag_backward(const Tensor& grad_, const Tensor& ids,
                                                        const Tensor& lengths,
                                                        const Tensor& table_offsets,
                                                        std::optional<Tensor> sample_weights,
                                                        bool mean) {
  const BagInputs inputs(ids, lengths, table_offsets, sample_weights);
  const Tensor grad = inputs.checked_grad(grad_);
  const int64_t dim = grad.size(2);
  const Launcher launch(kLookUp, grad);
  const Tensor ends = ends_of(launch, inputs, Errors(launch, kJointEmbedding));
  const BagEnds bags{ends.const_data_ptr<int64_t>(), inputs.bags, inputs.total};
  Tensor rows =
      torch::stable::new_empty(inputs.ids, {inputs.total}, std::optional(ScalarType::Long));
  Tensor values = torch::stable::new_empty(grad, {inputs.total, dim});
  dispatch_floating(grad.scalar_type(), [&]<typename scalar_t>() {
    const auto* grad_data = grad.const_data_ptr<scalar_t>();
    auto* values_data = values.mutable_data_ptr<scalar_t>();
    dispatch_vector<scalar_t>(dim, {grad_data, values_data}, [&]<int kVector>() {
      const Groups groups(dim / kVector, kBagThreads);
      launch(spread_bags<scalar_t, kVector>, ceil_div(inputs.bags, groups.threads.y),
             groups.threads, 0, grad_data, Integers(inputs.ids), Factors{inputs.factors(), mean},
             bags, TableRanges(inputs.table_offsets).begins, inputs.tables, dim,
             rows.mutable_data_ptr<int64_t>(), values_data);
    });
  });
  return {rows, values};
}

Tensor joint_embedding_bag_sample_weights_backward(const Tensor& grad_, const Tensor& weight_,
                                                   const Tensor& rows_, const Tensor& lengths,
                                                   bool mean) {
  const BagProducts bags(grad_, weight_, rows_, lengths);
  const Tensor& weight = bags.weight;
  const Tensor& grad = bags.grad;
  const Launcher launch(kLookUp, weight);
  const Errors errors(launch, kJointEmbedding);
  const Tensor ends = ends_of(launch, bags, errors);
  Tensor output = torch::stable::new_empty(weight, {bags.total}, std::optional(ScalarType::Float));
  constexpr int kWarps = kBagThreads / kWarp;
  dispatch_floating(weight.scalar_type(), [&]<typename weight_t>() {
    dispatch_floating(grad.scalar_type(), [&]<typename grad_t>() {
      launch(dot_bags<weight_t, grad_t>, ceil_div(bags.bags, kWarps), dim3(kWarp, kWarps), 0,
             weight.const_data_ptr<weight_t>(), grad.const_data_ptr<grad_t>(),
             bags.rows.const_data_ptr<int64_t>(),
             BagEnds{ends.const_data_ptr<int64_t>(), bags.bags, bags.total}, weight.size(0),
             bags.dim, mean, output.mutable_data_ptr<float>(), errors);
    });
  });
  return output;
}

}  // namespace
}  // namespace dlrm

DLRM_CUDA_IMPL(m) {
  m.impl("joint_embedding", TORCH_BOX(&dlrm::joint_embedding));
  m.impl("joint_embedding_bag", TORCH_BOX(&dlrm::joint_embedding_bag));
  m.impl("joint_embedding_bag_backward", TORCH_BOX(&dlrm::joint_embedding_bag_backward));
  m.impl("joint_embedding_bag_sample_weights_backward",
         TORCH_BOX(&dlrm::joint_embedding_bag_sample_weights_backward));
}
