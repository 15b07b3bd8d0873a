// Kernels of joint_embedding_pieces for one instruction set; see for_each_isa.h.

// Bytes of rows asked for ahead of the one being copied: enough to cover memory's latency.
constexpr int64_t kPieceAheadBytes = 8192;

// Looks up one piece for samples [begin, end): reads each id once (and once more to prefetch its
// row), each row once, and writes each vector once, zeros for the rows of other pieces. Returns the
// first sample whose id is outside the table, where it stops, or -1.
template <typename weight_t, typename output_t, typename id_t>
int64_t look_up_piece(const Piece& piece, const weight_t* weight, int64_t dim, const id_t* ids,
                      int64_t columns, output_t* output, int64_t width, int64_t begin,
                      int64_t end) {
  const int64_t row_bytes = dim * sizeof(weight_t);
  const int64_t ahead = std::clamp<int64_t>(kPieceAheadBytes / row_bytes, 4, 64);
  int64_t next = begin;
  for (int64_t sample = begin; sample < end; ++sample) {
    for (; next < std::min(sample + ahead, end); ++next) {
      const int64_t row = piece.row(ids[next * columns + piece.column]);
      if (row >= 0) {
        prefetch_bytes(reinterpret_cast<uintptr_t>(weight + row * dim), row_bytes);
      }
    }
    const int64_t id = ids[sample * columns + piece.column];
    if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(piece.table_rows)) return sample;
    const int64_t row = piece.row(id);
    output_t* to = output + sample * width;
    if (row >= 0) {
      copy_elements(weight + row * dim, to, dim);
    } else {
      std::memset(to, 0, dim * sizeof(output_t));
    }
  }
  return -1;
}

// Writes the rows that samples [begin, end) look up in `count` pieces of one weight, and the
// gradients of their vectors, which are side by side in `grad`. Reads each gradient once.
template <typename scalar_t, typename id_t>
void gradients_of_pieces(const Piece* pieces, int64_t count, int64_t dim, const id_t* ids,
                         int64_t columns, const scalar_t* grad, int64_t width, int64_t* rows,
                         scalar_t* values, int64_t begin, int64_t end) {
  for (int64_t sample = begin; sample < end; ++sample) {
    for (int64_t p = 0; p < count; ++p) {
      const int64_t row = pieces[p].row(ids[sample * columns + pieces[p].column]);
      if (row < 0) continue;
      *rows++ = row;
      copy_elements(grad + sample * width + p * dim, values, dim);
      values += dim;
    }
  }
}
