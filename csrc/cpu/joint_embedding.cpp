#include "../joint_embedding.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <memory>
#include <tuple>
#include <vector>

#include "bag_offsets.h"
#include "isa.h"
#include "network.h"
#include "tasks.h"

#define DLRM_KERNELS "joint_embedding_kernels.h"
#include "for_each_isa.h"

namespace dlrm {
namespace {

constexpr int64_t kElementsPerTask = 32768;
constexpr int64_t kLengthsPerTask = 131072;  // 0.1 ms, for which threads need not be woken

int64_t bags_per_task(const BagLengths& bags, int64_t dim) {
  const int64_t rows_per_bag = 1 + bags.total / std::max<int64_t>(1, bags.bags);
  return std::max<int64_t>(1, kElementsPerTask / (dim * rows_per_bag));
}

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
        const auto gather = streams(output_data, batch * tables, dim)
                                ? DLRM_KERNEL(gather_rows<weight_t, output_t, id_t, true>)
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

// Sums the lengths of each task, then the tasks, then writes where each bag begins: two passes over
// the lengths.
Tensor bag_offsets_of(const BagLengths& bags) {
  Tensor offsets = allocate(bags.lengths, {bags.bags + 1}, ScalarType::Long);
  int64_t* offsets_data = offsets.mutable_data_ptr<int64_t>();
  const int64_t tasks = (bags.bags + kLengthsPerTask - 1) / kLengthsPerTask;
  std::vector<int64_t> first(tasks + 1);
  FirstBad bad;
  dispatch_id(bags.lengths.scalar_type(), [&]<typename length_t>() {
    const auto* lengths = bags.lengths.const_data_ptr<length_t>();
    const auto end_of = [&](int64_t task) {
      return std::min(bags.bags, (task + 1) * kLengthsPerTask);
    };
    torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        uint64_t sum = 0;  // of lengths that may be wrong
        bool wrong = false;
        for (int64_t bag = task * kLengthsPerTask; bag < end_of(task); ++bag) {
          sum += lengths[bag];
          wrong |= lengths[bag] < 0 || int64_t{lengths[bag]} > bags.total;
        }
        first[task + 1] = sum;
        for (int64_t bag = task * kLengthsPerTask; wrong && bag < end_of(task); ++bag) {
          if (lengths[bag] < 0 || int64_t{lengths[bag]} > bags.total) bad.report(bag);
        }
      }
    });
    DLRM_CHECK(!bad.any(), kLookUp, ": length ", bad.any() ? int64_t{lengths[bad.position()]} : 0,
               " of table ", bad.position() % std::max<int64_t>(1, bags.tables), " in batch row ",
               bad.position() / std::max<int64_t>(1, bags.tables),
               ": expected 0 <= length <= ", bags.total, ", the number of ids");
    for (int64_t task = 0; task < tasks; ++task) first[task + 1] += first[task];
    DLRM_CHECK(first[tasks] == bags.total, kLookUp, ": lengths add up to ", first[tasks],
               ": expected the number of ids, ", bags.total);
    torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        int64_t sum = first[task];
        for (int64_t bag = task * kLengthsPerTask; bag < end_of(task); ++bag) {
          offsets_data[bag] = sum;
          sum += lengths[bag];
        }
      }
    });
  });
  offsets_data[bags.bags] = bags.total;
  return offsets;
}

int64_t bag_of(int64_t position, const int64_t* bag_offsets, int64_t bags) {
  return std::upper_bound(bag_offsets, bag_offsets + bags + 1, position) - bag_offsets - 1;
}

namespace {

Tensor joint_embedding_bag(const Tensor& weight_, const Tensor& ids, const Tensor& lengths,
                           const Tensor& table_offsets_, std::optional<Tensor> sample_weights,
                           bool mean, std::optional<ScalarType> dtype) {
  const BagInputs inputs(ids, lengths, table_offsets_, sample_weights);
  const Tensor weight = checked_weight(weight_, inputs.lengths);
  const ScalarType output_dtype = checked_dtype(dtype, weight);
  const int64_t tables = inputs.tables, dim = weight.size(1);
  const TableRanges ranges(inputs.table_offsets);
  ranges.check(tables, weight.size(0));
  const Tensor offsets = bag_offsets_of(inputs);
  const int64_t* bag_offsets = offsets.const_data_ptr<int64_t>();
  Tensor output = allocate(weight, {inputs.batch, tables, dim}, output_dtype);
  FirstBad bad;
  dispatch_floating(weight.scalar_type(), [&]<typename weight_t>() {
    dispatch_floating(output_dtype, [&]<typename output_t>() {
      dispatch_id(inputs.ids.scalar_type(), [&]<typename id_t>() {
        const auto* weight_data = weight.const_data_ptr<weight_t>();
        const auto* ids_data = inputs.ids.const_data_ptr<id_t>();
        const float* sample_weights_data = inputs.factors();
        auto* output_data = output.mutable_data_ptr<output_t>();
        const auto pool = DLRM_KERNEL(pool_bags<weight_t, output_t, id_t>);
        torch::stable::parallel_for(
            0, inputs.bags, bags_per_task(inputs, dim), [&](int64_t begin, int64_t end) {
              const std::unique_ptr<int64_t[]> rows(
                  new int64_t[bag_offsets[end] - bag_offsets[begin]]);
              const int64_t position =
                  pool(weight_data, ids_data, sample_weights_data, bag_offsets, ranges, tables, dim,
                       mean, output_data, rows.get(), begin, end);
              if (position >= 0) bad.report(position);
            });
        if (bad.any()) {
          const int64_t bag = bag_of(bad.position(), bag_offsets, inputs.bags);
          ranges.fail_for(ids_data[bad.position()], bag, tables);
        }
      });
    });
  });
  return output;
}

std::tuple<Tensor, Tensor> joint_embedding_bag_backward(const Tensor& grad_, const Tensor& ids,
                                                        const Tensor& lengths,
                                                        const Tensor& table_offsets_,
                                                        std::optional<Tensor> sample_weights,
                                                        bool mean) {
  const BagInputs inputs(ids, lengths, table_offsets_, sample_weights);
  const Tensor grad = inputs.checked_grad(grad_);
  const int64_t tables = inputs.tables, dim = grad.size(2);
  const TableRanges ranges(inputs.table_offsets);
  const Tensor offsets = bag_offsets_of(inputs);
  const int64_t* bag_offsets = offsets.const_data_ptr<int64_t>();
  Tensor rows = allocate(inputs.ids, {inputs.total}, ScalarType::Long);
  Tensor values = allocate(grad, {inputs.total, dim});
  int64_t* rows_data = rows.mutable_data_ptr<int64_t>();
  dispatch_id(inputs.ids.scalar_type(), [&]<typename id_t>() {
    const auto* ids_data = inputs.ids.const_data_ptr<id_t>();
    dispatch_floating(grad.scalar_type(), [&]<typename scalar_t>() {
      const auto* grad_data = grad.const_data_ptr<scalar_t>();
      const float* sample_weights_data = inputs.factors();
      auto* values_data = values.mutable_data_ptr<scalar_t>();
      const auto spread = streams(values_data, inputs.total, dim)
                              ? DLRM_KERNEL(spread_bags<scalar_t, true>)
                              : DLRM_KERNEL(spread_bags<scalar_t, false>);
      torch::stable::parallel_for(
          0, inputs.bags, bags_per_task(inputs, dim), [&](int64_t begin, int64_t end) {
            for (int64_t bag = begin; bag < end; ++bag) {
              const int64_t offset = ranges.begins[bag % tables];
              for (int64_t i = bag_offsets[bag]; i < bag_offsets[bag + 1]; ++i) {
                rows_data[i] = offset + ids_data[i];
              }
            }
            spread(grad_data, sample_weights_data, bag_offsets, dim, mean, values_data, begin, end);
          });
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
  const int64_t* rows_data = bags.rows.const_data_ptr<int64_t>();
  const Tensor offsets = bag_offsets_of(bags);
  const int64_t* bag_offsets = offsets.const_data_ptr<int64_t>();
  Tensor output = allocate(weight, {bags.total}, ScalarType::Float);
  float* output_data = output.mutable_data_ptr<float>();
  FirstBad bad;
  dispatch_floating(weight.scalar_type(), [&]<typename weight_t>() {
    dispatch_floating(grad.scalar_type(), [&]<typename grad_t>() {
      const auto* weight_data = weight.const_data_ptr<weight_t>();
      const auto* grad_data = grad.const_data_ptr<grad_t>();
      const auto dot = DLRM_KERNEL(dot_bags<weight_t, grad_t>);
      torch::stable::parallel_for(
          0, bags.bags, bags_per_task(bags, bags.dim), [&](int64_t begin, int64_t end) {
            const int64_t position = dot(weight_data, grad_data, rows_data, bag_offsets,
                                         weight.size(0), bags.dim, mean, output_data, begin, end);
            if (position >= 0) bad.report(position);
          });
    });
  });
  DLRM_CHECK(!bad.any(), kLookUp, ": row ", bad.any() ? rows_data[bad.position()] : 0,
             " at position ", bad.position(), ": expected 0 <= row < ", weight.size(0));
  return output;
}

}  // namespace
}  // namespace dlrm

STABLE_TORCH_LIBRARY_IMPL(dlrm, CPU, m) {
  m.impl("joint_embedding", TORCH_BOX(&dlrm::joint_embedding));
  m.impl("joint_embedding_bag", TORCH_BOX(&dlrm::joint_embedding_bag));
  m.impl("joint_embedding_bag_backward", TORCH_BOX(&dlrm::joint_embedding_bag_backward));
  m.impl("joint_embedding_bag_sample_weights_backward",
         TORCH_BOX(&dlrm::joint_embedding_bag_sample_weights_backward));
}
