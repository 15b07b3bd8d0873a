#include "../joint_embedding_pieces.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "first_bad.h"
#include "isa.h"

#define DLRM_KERNELS "joint_embedding_pieces_kernels.h"
#include "for_each_isa.h"

namespace dlrm {
namespace {

constexpr int64_t kElementsPerTask = 32768;
constexpr int64_t kSamplesAtOnce = 128;  // whose vectors stay in the second-level cache

int64_t samples_per_task(const Pieces& pieces) {
  return std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, pieces.width));
}

Tensor joint_embedding_pieces(std::vector<Tensor> weights, const Tensor& ids, const Tensor& pieces_,
                              std::optional<ScalarType> dtype) {
  DLRM_CHECK(!weights.empty(), kPiecesName, ": expected one weight or more");
  const ScalarType weight_dtype = weights[0].scalar_type();
  const ScalarType output_dtype = dtype.value_or(weight_dtype);
  std::vector<int64_t> dims;
  for (Tensor& weight : weights) {
    DLRM_CHECK(weight.dim() == 2 && weight.size(1) > 0 && is_floating(weight_dtype) &&
                   weight.scalar_type() == weight_dtype && weight.is_cpu(),
               kPiecesName, ": expected weights [rows, dim > 0] of one floating dtype, got ",
               shape_of(weight), " ", dtype_of(weight));
    weight = as_contiguous(weight);
    dims.push_back(weight.size(1));
  }
  const Pieces pieces(pieces_, ids, dims);
  for (const Piece& piece : pieces.all) {
    DLRM_CHECK(piece.offset + piece.end - piece.first <= weights[piece.weight].size(0), kPiecesName,
               ": a piece of rows [", piece.first, ", ", piece.end, ") at ", piece.offset,
               " ends outside its weight ", shape_of(weights[piece.weight]));
  }
  DLRM_CHECK(is_floating(output_dtype), kPiecesName,
             ": expected dtype Float, BFloat16 or Half, got ",
             torch::headeronly::toString(output_dtype));
  const int64_t count = static_cast<int64_t>(pieces.all.size()), width = pieces.width;
  Tensor output = allocate(weights[0], {pieces.batch, width}, output_dtype);
  FirstBad bad;
  dispatch_floating(weight_dtype, [&]<typename weight_t>() {
    dispatch_floating(output_dtype, [&]<typename output_t>() {
      dispatch_id(pieces.ids.scalar_type(), [&]<typename id_t>() {
        const auto* ids_data = pieces.ids.const_data_ptr<id_t>();
        auto* output_data = output.mutable_data_ptr<output_t>();
        std::vector<const weight_t*> data;
        for (const Tensor& weight : weights) data.push_back(weight.const_data_ptr<weight_t>());
        const auto look_up = DLRM_KERNEL(look_up_piece<weight_t, output_t, id_t>);
        const auto block = [&](int64_t begin, int64_t end) {
          for (int64_t p = 0; p < count; ++p) {
            const Piece& piece = pieces.all[p];
            const int64_t sample =
                look_up(piece, data[piece.weight], pieces.dims[piece.weight], ids_data,
                        pieces.columns, output_data + pieces.at[p], width, begin, end);
            if (sample >= 0) bad.report(sample * count + p);
          }
        };
        torch::stable::parallel_for(0, pieces.batch, samples_per_task(pieces),
                                    [&](int64_t begin, int64_t end) {
                                      for (; begin < end; begin += kSamplesAtOnce) {
                                        block(begin, std::min(begin + kSamplesAtOnce, end));
                                      }
                                    });
        if (bad.any()) {
          const Piece& piece = pieces.all[bad.position() % count];
          const int64_t sample = bad.position() / count;
          fail(kPiecesName, ": id ", int64_t{ids_data[sample * pieces.columns + piece.column]},
               " of table ", piece.column, " in batch row ", sample, ": expected 0 <= id < ",
               piece.table_rows);
        }
      });
    });
  });
  return output;
}

// Where each task's rows of one weight begin, and the end.
template <typename id_t>
std::vector<int64_t> rows_of_tasks(const Pieces& pieces, const id_t* ids, int64_t weight,
                                   int64_t samples_of_task, int64_t tasks) {
  std::vector<int64_t> begins(tasks + 1, 0);
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t last = std::min(pieces.batch, (task + 1) * samples_of_task);
      int64_t found = 0;
      for (int64_t sample = task * samples_of_task; sample < last; ++sample) {
        for (int64_t p = pieces.begin[weight]; p < pieces.begin[weight + 1]; ++p) {
          const Piece& piece = pieces.all[p];
          found += piece.row(ids[sample * pieces.columns + piece.column]) >= 0;
        }
      }
      begins[task + 1] = found;
    }
  });
  for (int64_t task = 0; task < tasks; ++task) begins[task + 1] += begins[task];
  return begins;
}

std::vector<Tensor> joint_embedding_pieces_backward(const Tensor& grad_, const Tensor& ids,
                                                    const Tensor& pieces_,
                                                    std::vector<int64_t> dims) {
  const Pieces pieces(pieces_, ids, dims);
  DLRM_CHECK(grad_.dim() == 2 && grad_.size(0) == pieces.batch && grad_.size(1) == pieces.width &&
                 is_floating(grad_.scalar_type()) && grad_.is_cpu(),
             kPiecesName, ": expected grad [", pieces.batch, ", ", pieces.width,
             "] of Float, BFloat16 or Half, got ", shape_of(grad_), " ", dtype_of(grad_));
  const Tensor grad = as_contiguous(grad_);
  const int64_t samples_of_task = samples_per_task(pieces);
  const int64_t tasks = (pieces.batch + samples_of_task - 1) / samples_of_task;
  std::vector<Tensor> found;
  dispatch_floating(grad.scalar_type(), [&]<typename scalar_t>() {
    dispatch_id(pieces.ids.scalar_type(), [&]<typename id_t>() {
      const auto* ids_data = pieces.ids.const_data_ptr<id_t>();
      const auto* grad_data = grad.const_data_ptr<scalar_t>();
      const auto gradients = DLRM_KERNEL(gradients_of_pieces<scalar_t, id_t>);
      for (size_t w = 0; w < dims.size(); ++w) {
        const int64_t first = pieces.begin[w], count = pieces.begin[w + 1] - first;
        const auto begins = rows_of_tasks(pieces, ids_data, w, samples_of_task, tasks);
        Tensor rows = allocate(grad, {begins[tasks]}, ScalarType::Long);
        Tensor values = allocate(grad, {begins[tasks], dims[w]});
        auto* rows_data = rows.mutable_data_ptr<int64_t>();
        auto* values_data = values.mutable_data_ptr<scalar_t>();
        torch::stable::parallel_for(0, count > 0 ? tasks : 0, 1, [&](int64_t begin, int64_t end) {
          for (int64_t task = begin; task < end; ++task) {
            gradients(&pieces.all[first], count, dims[w], ids_data, pieces.columns,
                      grad_data + pieces.at[first], pieces.width, rows_data + begins[task],
                      values_data + begins[task] * dims[w], task * samples_of_task,
                      std::min(pieces.batch, (task + 1) * samples_of_task));
          }
        });
        found.push_back(rows);
        found.push_back(values);
      }
    });
  });
  return found;
}

}  // namespace
}  // namespace dlrm

STABLE_TORCH_LIBRARY_IMPL(dlrm, CPU, m) {
  m.impl("joint_embedding_pieces", TORCH_BOX(&dlrm::joint_embedding_pieces));
  m.impl("joint_embedding_pieces_backward", TORCH_BOX(&dlrm::joint_embedding_pieces_backward));
}
