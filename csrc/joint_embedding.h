// Sizes and checks of look-ups and their gradients, for every backend.
#pragma once

#include <optional>

#include "tensors.h"

namespace dlrm {

constexpr const char* kLookUp = "joint_embedding";

// Where the rows of each table begin and end in the weight.
struct TableRanges {
  const int64_t* begins;
  const int64_t* ends;

  // `offsets` are [tables + 1] or, where tables may have the same rows, [2, tables].
  explicit TableRanges(const Tensor& offsets)
      : begins(offsets.const_data_ptr<int64_t>()),
        ends(begins + (offsets.dim() == 2 ? offsets.size(1) : 1)) {}

  int64_t place_of_end(int64_t table) const { return ends - begins + table; }

  // The offsets are readable here: on the host.
  void check(int64_t tables, int64_t total_rows) const {
    const auto check_offset = [&](int64_t place, int64_t least) {
      const int64_t offset = begins[place];
      DLRM_CHECK(offset >= least && offset <= total_rows, kLookUp, ": table_offsets[", place,
                 "] = ", offset, ": expected offsets that do not fall, within the weight's ",
                 total_rows, " rows");
    };
    for (int64_t t = 0; t < tables; ++t) {
      check_offset(t, 0);
      check_offset(place_of_end(t), begins[t]);
    }
  }

  // Fails with the name of an id outside its table, where `bag` is batch row * tables + table.
  [[noreturn]] void fail_for(int64_t id, int64_t bag, int64_t tables) const {
    const int64_t table = bag % tables;
    fail(kLookUp, ": id ", id, " of table ", table, " in batch row ", bag / tables,
         ": expected 0 <= id < ", ends[table] - begins[table]);
  }
};

// Each is on the device of `ids`, or of other tensors that say which rows are meant.
inline Tensor checked_offsets(const Tensor& offsets, int64_t tables, const Tensor& ids) {
  DLRM_EXPECT(offsets,
              offsets.scalar_type() == ScalarType::Long && offsets.device() == ids.device() &&
                  (has_shape(offsets, {tables + 1}) || has_shape(offsets, {2, tables})),
              kLookUp, ": expected table_offsets [", tables + 1, "] Long for ", tables,
              " tables on the device of ids");
  return as_contiguous(offsets);
}

inline Tensor checked_weight(const Tensor& weight, const Tensor& ids) {
  DLRM_EXPECT(weight,
              weight.dim() == 2 && weight.size(1) > 0 && is_floating(weight.scalar_type()) &&
                  weight.device() == ids.device(),
              kLookUp,
              ": expected weight [rows, dim > 0] of Float, BFloat16 or Half on the device of ids");
  return as_contiguous(weight);
}

inline ScalarType checked_dtype(std::optional<ScalarType> dtype, const Tensor& weight) {
  DLRM_CHECK(!dtype || is_floating(*dtype), kLookUp,
             ": expected dtype Float, BFloat16 or Half, got ",
             torch::headeronly::toString(dtype.value_or(ScalarType::Float)));
  return dtype.value_or(weight.scalar_type());
}

struct JointEmbeddingInputs {
  int64_t batch, tables, dim, total_rows;
  Tensor weight;         // [total_rows, dim], contiguous
  Tensor ids;            // [batch, tables], contiguous
  Tensor table_offsets;  // see TableRanges; contiguous
  ScalarType output_dtype;

  JointEmbeddingInputs(const Tensor& weight_, const Tensor& ids_, const Tensor& offsets,
                       std::optional<ScalarType> dtype)
      : weight(checked_weight(weight_, ids_)), output_dtype(checked_dtype(dtype, weight_)) {
    DLRM_EXPECT(ids_, ids_.dim() == 2 && is_id(ids_.scalar_type()), kLookUp,
                ": expected ids [batch, tables] of Char, Short, Int or Long");
    batch = ids_.size(0);
    tables = ids_.size(1);
    dim = weight.size(1);
    total_rows = weight.size(0);
    ids = as_contiguous(ids_);
    table_offsets = checked_offsets(offsets, tables, ids);
  }
};

// Number of ids of each bag. `total` is the size of the tensor of ids.
struct BagLengths {
  int64_t batch, tables, bags, total;
  Tensor lengths;  // [batch, tables], contiguous

  BagLengths(const Tensor& lengths_, int64_t total_) : total(total_) {
    DLRM_EXPECT(lengths_, lengths_.dim() == 2 && is_id(lengths_.scalar_type()), kLookUp,
                ": expected lengths [batch, tables] of Char, Short, Int or Long");
    batch = lengths_.size(0);
    tables = lengths_.size(1);
    bags = batch * tables;
    lengths = as_contiguous(lengths_);
  }

  Tensor checked_grad(const Tensor& grad) const {
    DLRM_EXPECT(grad,
                has_shape(grad, {batch, tables, -1}) && grad.size(2) > 0 &&
                    is_floating(grad.scalar_type()) && grad.device() == lengths.device(),
                kLookUp, ": expected grad [", batch, ", ", tables,
                ", dim > 0] of Float, BFloat16 or Half on the device of lengths");
    return as_contiguous(grad);
  }

  // The rows of all ids.
  Tensor checked_rows(const Tensor& rows) const {
    DLRM_EXPECT(rows, has_shape(rows, {total}) && rows.scalar_type() == ScalarType::Long, kLookUp,
                ": expected rows [total] Long");
    return as_contiguous(rows);
  }
};

struct BagInputs : BagLengths {
  Tensor ids;                            // [total], contiguous
  Tensor table_offsets;                  // see TableRanges; contiguous
  std::optional<Tensor> sample_weights;  // [total] float, contiguous

  BagInputs(const Tensor& ids_, const Tensor& lengths_, const Tensor& offsets,
            const std::optional<Tensor>& weights)
      : BagLengths(lengths_, ids_.numel()) {
    DLRM_EXPECT(ids_, ids_.dim() == 1 && is_id(ids_.scalar_type()), kLookUp,
                ": expected ids [total] of Char, Short, Int or Long");
    DLRM_CHECK(ids_.device() == lengths.device(), kLookUp,
               ": ids and lengths are not on one device");
    ids = as_contiguous(ids_);
    table_offsets = checked_offsets(offsets, tables, ids);
    if (!weights) return;
    DLRM_EXPECT(*weights,
                has_shape(*weights, {total}) && weights->scalar_type() == ScalarType::Float &&
                    weights->device() == ids.device(),
                kLookUp, ": expected sample_weights [", total, "] Float on the device of ids");
    sample_weights = as_contiguous(*weights);
  }

  const float* factors() const {
    return sample_weights ? sample_weights->const_data_ptr<float>() : nullptr;
  }
};

// Operands of joint_embedding_bag_sample_weights_backward.
struct BagProducts : BagLengths {
  Tensor grad;    // [batch, tables, dim], contiguous
  Tensor weight;  // [rows, dim], contiguous
  Tensor rows;    // [total] long, contiguous
  int64_t dim;

  BagProducts(const Tensor& grad_, const Tensor& weight_, const Tensor& rows_,
              const Tensor& lengths_)
      : BagLengths(lengths_, rows_.numel()),
        grad(checked_grad(grad_)),
        weight(checked_weight(weight_, rows_)),
        rows(checked_rows(rows_)),
        dim(weight.size(1)) {
    DLRM_EXPECT(grad, grad.size(2) == dim, kLookUp, ": expected grad [", batch, ", ", tables, ", ",
                dim, "] for weight ", shape_of(weight));
  }
};

}  // namespace dlrm
