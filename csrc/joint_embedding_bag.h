// Sizes and checks of one call of joint_embedding_bag or its gradients, for every backend.
#pragma once

#include <optional>

#include "joint_embedding.h"

namespace dlrm {

constexpr const char* kBagName = "joint_embedding_bag";

// Number of ids of each bag. `total` is the size of the tensor of ids.
struct BagLengths {
  int64_t batch;
  int64_t tables;
  int64_t bags;
  int64_t total;
  Tensor lengths;  // [batch, tables], contiguous

  BagLengths(const Tensor& lengths_, int64_t total_) : total(total_) {
    DLRM_CHECK(lengths_.dim() == 2 && is_id(lengths_.scalar_type()), kBagName,
               ": expected lengths [batch, tables] of Char, Short, Int or Long, got ",
               shape_of(lengths_), " ", dtype_of(lengths_));
    batch = lengths_.size(0);
    tables = lengths_.size(1);
    bags = batch * tables;
    lengths = as_contiguous(lengths_);
  }
};

struct BagInputs : BagLengths {
  Tensor ids;                            // [total], contiguous
  Tensor table_offsets;                  // see TableRanges; contiguous
  std::optional<Tensor> sample_weights;  // [total] float, contiguous

  BagInputs(const Tensor& ids_, const Tensor& lengths_, const Tensor& table_offsets_,
            const std::optional<Tensor>& sample_weights_)
      : BagLengths(lengths_, ids_.numel()) {
    DLRM_CHECK(ids_.dim() == 1 && is_id(ids_.scalar_type()), kBagName,
               ": expected ids [total] of Char, Short, Int or Long, got ", shape_of(ids_), " ",
               dtype_of(ids_));
    DLRM_CHECK(TableRanges::may_be(table_offsets_, tables), kBagName, ": expected table_offsets [",
               tables + 1, "] Long for lengths ", shape_of(lengths_), ", got ",
               shape_of(table_offsets_), " ", dtype_of(table_offsets_));
    bool one_device =
        ids_.device() == lengths_.device() && ids_.device() == table_offsets_.device();
    if (sample_weights_) {
      DLRM_CHECK(sample_weights_->dim() == 1 && sample_weights_->size(0) == total &&
                     sample_weights_->scalar_type() == ScalarType::Float,
                 kBagName, ": expected sample_weights [", total, "] Float, got ",
                 shape_of(*sample_weights_), " ", dtype_of(*sample_weights_));
      one_device = one_device && ids_.device() == sample_weights_->device();
      sample_weights = as_contiguous(*sample_weights_);
    }
    DLRM_CHECK(one_device, kBagName,
               ": ids, lengths, table_offsets and sample_weights are not all on one device");
    ids = as_contiguous(ids_);
    table_offsets = as_contiguous(table_offsets_);
  }
};

inline Tensor checked_bag_weight(const Tensor& weight, const Tensor& lengths) {
  DLRM_CHECK(weight.dim() == 2 && weight.size(1) > 0 && is_floating(weight.scalar_type()), kBagName,
             ": expected weight [rows, dim > 0] of Float, BFloat16 or Half, got ", shape_of(weight),
             " ", dtype_of(weight));
  DLRM_CHECK(weight.device() == lengths.device(), kBagName,
             ": weight and lengths are not on one device");
  return as_contiguous(weight);
}

inline Tensor checked_bag_grad(const Tensor& grad, const BagLengths& bags) {
  DLRM_CHECK(grad.dim() == 3 && grad.size(0) == bags.batch && grad.size(1) == bags.tables &&
                 grad.size(2) > 0 && is_floating(grad.scalar_type()),
             kBagName, ": expected grad [", bags.batch, ", ", bags.tables,
             ", dim > 0] of Float, BFloat16 or Half, got ", shape_of(grad), " ", dtype_of(grad));
  DLRM_CHECK(grad.device() == bags.lengths.device(), kBagName,
             ": grad and lengths are not on one device");
  return as_contiguous(grad);
}

// Operands of joint_embedding_bag_sample_weights_backward.
struct BagProducts : BagLengths {
  Tensor grad;    // [batch, tables, dim], contiguous
  Tensor weight;  // [rows, dim], contiguous
  Tensor rows;    // [total] long, contiguous
  int64_t dim;

  BagProducts(const Tensor& grad_, const Tensor& weight_, const Tensor& rows_,
              const Tensor& lengths_)
      : BagLengths(lengths_, rows_.numel()),
        grad(checked_bag_grad(grad_, *this)),
        weight(checked_bag_weight(weight_, lengths)),
        rows(as_contiguous(rows_)),
        dim(weight.size(1)) {
    DLRM_CHECK(rows_.dim() == 1 && rows_.scalar_type() == ScalarType::Long, kBagName,
               ": expected rows [total] Long, got ", shape_of(rows_), " ", dtype_of(rows_));
    DLRM_CHECK(grad.size(2) == dim, kBagName, ": expected grad [", batch, ", ", tables, ", ", dim,
               "] for weight ", shape_of(weight), ", got ", shape_of(grad));
  }
};

}  // namespace dlrm
