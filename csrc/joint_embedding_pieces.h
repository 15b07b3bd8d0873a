// Sizes and checks of one call of joint_embedding_pieces or its gradient, for every backend.
#pragma once

#include <vector>

#include "tensors.h"

namespace dlrm {

constexpr const char* kPiecesName = "joint_embedding_pieces";

// Rows of a table that are stored in a weight; one row of the tensor `pieces`.
struct Piece {
  int64_t weight;      // its number
  int64_t column;      // of the ids
  int64_t first, end;  // rows of the table that are here
  int64_t table_rows;
  int64_t offset;  // in the weight, of the first row

  // The row of the weight, or -1 if it belongs to another piece.
  int64_t row(int64_t id) const {
    const auto own = static_cast<uint64_t>(id) - static_cast<uint64_t>(first);
    const bool here = own < static_cast<uint64_t>(end - first);
    return here ? offset + static_cast<int64_t>(own) : -1;
  }
};
static_assert(sizeof(Piece) == 6 * sizeof(int64_t));

struct Pieces {
  int64_t batch;
  int64_t columns;             // of the ids
  int64_t width;               // of all pieces side by side
  std::vector<int64_t> dims;   // of each weight
  std::vector<int64_t> begin;  // of each weight, and the end: its first piece
  std::vector<int64_t> at;     // of each piece: its first column of `width`
  std::vector<Piece> all;      // by weight
  Tensor ids;                  // [batch, columns], contiguous

  Pieces(const Tensor& pieces, const Tensor& ids_, const std::vector<int64_t>& dims_)
      : dims(dims_) {
    DLRM_CHECK(ids_.dim() == 2 && is_id(ids_.scalar_type()) && ids_.is_cpu(), kPiecesName,
               ": expected ids [batch, columns] of Char, Short, Int or Long, got ", shape_of(ids_),
               " ", dtype_of(ids_));
    DLRM_CHECK(pieces.dim() == 2 && pieces.size(1) == 6 &&
                   pieces.scalar_type() == ScalarType::Long && pieces.is_cpu() &&
                   pieces.is_contiguous(),
               kPiecesName, ": expected contiguous pieces [pieces, 6] Long, got ", shape_of(pieces),
               " ", dtype_of(pieces));
    batch = ids_.size(0);
    columns = ids_.size(1);
    ids = as_contiguous(ids_);
    const auto* data = reinterpret_cast<const Piece*>(pieces.const_data_ptr<int64_t>());
    all.assign(data, data + pieces.size(0));
    const auto weights = static_cast<int64_t>(dims.size());
    begin.assign(weights + 1, 0);
    width = 0;
    int64_t last = 0;
    for (size_t p = 0; p < all.size(); ++p) {
      const Piece& piece = all[p];
      DLRM_CHECK(
          piece.weight >= last && piece.weight < weights && piece.column >= 0 &&
              piece.column < columns && piece.first >= 0 && piece.first <= piece.end &&
              piece.end <= piece.table_rows && piece.offset >= 0,
          kPiecesName, ": piece ", p,
          ": expected a weight that does not fall, a column of the ids, and rows of its table");
      last = piece.weight;
      at.push_back(width);
      width += dims[piece.weight];
      ++begin[piece.weight + 1];
    }
    for (int64_t w = 0; w < weights; ++w) begin[w + 1] += begin[w];
  }
};

}  // namespace dlrm
