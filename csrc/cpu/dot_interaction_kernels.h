// Kernels of dot_interaction for one instruction set; see for_each_isa.h.
//
// A task owns a run of samples. It copies each sample once into scratch, as 32-bit units (a float,
// or a pair of bf16 where the processor multiplies such pairs), padded with zeros so that nothing
// below meets an edge, and writes each output row once.

#include "units.h"

// Vectors of one tile: as many accumulators as the registers hold.
constexpr int64_t kTileRows = kLanes == 16 ? 4 : 2;
constexpr int64_t kTileColumns = 4;

// The type that one value has in a unit.
template <typename unit_t>
using Value = std::conditional_t<std::is_same_v<unit_t, float>, float, BFloat16>;

// Writes row r's four sums over the lanes to rows[r].
DLRM_INLINE void store_sums(const Vec (&acc)[kTileRows][kTileColumns],
                            float* const (&rows)[kTileRows]) {
#if DLRM_LANES == 16
  __m512 sums[4];
  for (int64_t r = 0; r < 4; ++r) {
    const __m512 a = (__m512)acc[r][0], b = (__m512)acc[r][1];
    const __m512 c = (__m512)acc[r][2], d = (__m512)acc[r][3];
    const __m512d ab = (__m512d)(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
    const __m512d cd = (__m512d)(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
    sums[r] = (__m512)_mm512_unpacklo_pd(ab, cd) + (__m512)_mm512_unpackhi_pd(ab, cd);
  }
  const __m512 rows01 =
      _mm512_shuffle_f32x4(sums[0], sums[1], 0x44) + _mm512_shuffle_f32x4(sums[0], sums[1], 0xee);
  const __m512 rows23 =
      _mm512_shuffle_f32x4(sums[2], sums[3], 0x44) + _mm512_shuffle_f32x4(sums[2], sums[3], 0xee);
  const __m512 all =
      _mm512_shuffle_f32x4(rows01, rows23, 0x88) + _mm512_shuffle_f32x4(rows01, rows23, 0xdd);
  _mm_storeu_ps(rows[0], _mm512_extractf32x4_ps(all, 0));
  _mm_storeu_ps(rows[1], _mm512_extractf32x4_ps(all, 1));
  _mm_storeu_ps(rows[2], _mm512_extractf32x4_ps(all, 2));
  _mm_storeu_ps(rows[3], _mm512_extractf32x4_ps(all, 3));
#elif DLRM_LANES == 8
  for (int64_t r = 0; r < kTileRows; ++r) {
    const __m256 ab = _mm256_hadd_ps((__m256)acc[r][0], (__m256)acc[r][1]);
    const __m256 cd = _mm256_hadd_ps((__m256)acc[r][2], (__m256)acc[r][3]);
    const __m256 sums = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(rows[r],
                  _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
  }
#else
  for (int64_t r = 0; r < kTileRows; ++r) {
    for (int64_t c = 0; c < kTileColumns; ++c) {
      rows[r][c] = sum_lanes(acc[r][c]);
    }
  }
#endif
}

// Copies one vector into scratch.
template <typename scalar_t, typename unit_t>
DLRM_INLINE void pack_vector(const scalar_t* from, unit_t* to, int64_t dim) {
  if constexpr (std::is_same_v<unit_t, float>) {
    copy_elements(from, to, dim);
  } else {
    std::memcpy(to, from, dim * sizeof(scalar_t));
  }
}

// Units of scratch that forward_samples needs for the vectors, and floats for the dots.
template <typename scalar_t>
int64_t forward_row_units(const InteractionSizes& sizes) {
  return round_up(sizes.dim, kLanes * kPerUnit<Unit<scalar_t>>) / kPerUnit<Unit<scalar_t>>;
}
template <typename scalar_t>
int64_t forward_vector_floats(const InteractionSizes& sizes) {
  return round_up(sizes.vectors(), kTileColumns) * forward_row_units<scalar_t>(sizes);
}
template <typename scalar_t>
int64_t forward_scratch_floats(const InteractionSizes& sizes) {
  const int64_t padded = round_up(sizes.vectors(), kTileColumns);
  return forward_vector_floats<scalar_t>(sizes) + padded * (padded + 1) / 2 + kTileColumns;
}

// Prefetches the next sample's embeddings a few lines at a time while this one is multiplied, so
// that memory and arithmetic work in parallel.
struct NextSample {
  uintptr_t at;
  uintptr_t end;
  int64_t lines_per_tile;

  DLRM_INLINE NextSample of(const void* data, int64_t bytes, int64_t tiles) {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    return {begin, begin + bytes, bytes / 64 / tiles + 1};
  }
  DLRM_INLINE void fetch(NextSample& next) {
    for (int64_t line = 0; line < next.lines_per_tile && next.at < next.end; ++line) {
      __builtin_prefetch(reinterpret_cast<const void*>(next.at), 0, 2);
      next.at += 64;
    }
  }
};

// The dots of one sample's packed vectors: i dots of row i, row after row.
//
// Tiles at the diagonal write up to four values too many at a row's end: they go right to left, so
// that the next rows, which come later, overwrite those.
template <typename unit_t>
void lower_triangle(const unit_t* vectors, int64_t row_units, int64_t num_vectors, float* dots,
                    NextSample next) {
  for (int64_t i = 0; i < num_vectors; i += kTileRows) {
    const unit_t* a = vectors + i * row_units;
    for (int64_t j = round_up(i + kTileRows - 1, kTileColumns) - kTileColumns; j >= 0;
         j -= kTileColumns) {
      const unit_t* b = vectors + j * row_units;
      NextSample::fetch(next);
      Vec acc[kTileRows][kTileColumns] = {};
      for (int64_t k = 0; k < row_units; k += kLanes) {
        Vec columns[kTileColumns];
        for (int64_t c = 0; c < kTileColumns; ++c) columns[c] = load_units(b + c * row_units + k);
        for (int64_t r = 0; r < kTileRows; ++r) {
          const Vec row = load_units(a + r * row_units + k);
          for (int64_t c = 0; c < kTileColumns; ++c) {
            acc[r][c] = multiply_add<unit_t>(row, columns[c], acc[r][c]);
          }
        }
      }
      float* rows[kTileRows];
      for (int64_t r = 0; r < kTileRows; ++r) rows[r] = dots + (i + r) * (i + r - 1) / 2 + j;
      store_sums(acc, rows);
    }
  }
}

template <typename scalar_t>
void forward_samples(const InteractionSizes& sizes, const scalar_t* dense,
                     const scalar_t* embeddings, scalar_t* output, float* scratch, int64_t begin,
                     int64_t end) {
  using unit_t = Unit<scalar_t>;
  const int64_t dim = sizes.dim, width = sizes.width();
  const int64_t row_units = forward_row_units<scalar_t>(sizes);
  auto* vectors = reinterpret_cast<unit_t*>(scratch);
  float* dots = scratch + forward_vector_floats<scalar_t>(sizes);
  const int64_t tiles = std::max<int64_t>(1, sizes.dots() / (kTileRows * kTileColumns));
  for (int64_t sample = begin; sample < end; ++sample) {
    pack_vector(dense + sample * dim, vectors, dim);
    for (int64_t table = 0; table < sizes.tables; ++table) {
      pack_vector(embeddings + (sample * sizes.tables + table) * dim,
                  vectors + (table + 1) * row_units, dim);
    }
    const auto next = NextSample::of(embeddings + (sample + 1) * sizes.tables * dim,
                                     sizes.tables * dim * sizeof(scalar_t), tiles);
    lower_triangle(vectors, row_units, sizes.vectors(), dots, next);
    scalar_t* row = output + sample * width;
    std::memcpy(row, dense + sample * dim, dim * sizeof(scalar_t));
    copy_elements(dots, row + dim, sizes.dots());
    for (int64_t i = dim + sizes.dots(); i < width; ++i) row[i] = scalar_t(0.0f);
  }
}

// The gradient of vector i is the sum over j of s[i][j] * vector j, where s is the symmetric matrix
// of the dots' gradients; vector 0 has the output's first `dim` gradients besides. Those are packed
// behind the vectors as one more, with s[0][vectors] = 1.
template <typename scalar_t>
struct BackwardScratch {
  using unit_t = Unit<scalar_t>;
  using value_t = Value<unit_t>;
  static constexpr int64_t kPer = kPerUnit<unit_t>;

  int64_t groups;     // of kPer vectors, interleaved: a unit holds one element of each
  int64_t row_units;  // of a group
  int64_t s_stride;   // values of a row of s
  unit_t* vectors;
  value_t* s;
  float* grad;  // the dots' gradients, as floats

  BackwardScratch(const InteractionSizes& sizes, float* scratch)
      : groups((sizes.vectors() + 1 + kPer - 1) / kPer),
        row_units(round_up(sizes.dim, kLanes)),
        s_stride(groups * kPer),
        vectors(reinterpret_cast<unit_t*>(scratch)),
        s(reinterpret_cast<value_t*>(scratch + groups * row_units)),
        grad(scratch + groups * row_units + sizes.vectors() * s_stride) {}

  static int64_t floats(const InteractionSizes& sizes) {
    const BackwardScratch scratch(sizes, nullptr);
    return scratch.groups * scratch.row_units + sizes.vectors() * scratch.s_stride + sizes.dots();
  }

  // One sample's inputs.
  DLRM_INLINE void fill(const BackwardScratch& to, const InteractionSizes& sizes,
                        const scalar_t* dense, const scalar_t* embeddings, const scalar_t* grad) {
    const int64_t dim = sizes.dim, num_vectors = sizes.vectors();
    for (int64_t g = 0; g < to.groups; ++g) {
      const scalar_t* members[kPer];
      for (int64_t m = 0; m < kPer; ++m) {
        const int64_t i = g * kPer + m;
        members[m] = i == 0              ? dense
                     : i <= sizes.tables ? embeddings + (i - 1) * dim
                     : i == num_vectors  ? grad
                                         : nullptr;
      }
      pack_group(members, to.vectors + g * to.row_units, dim);
    }
    const value_t* dots;
    if constexpr (std::is_same_v<value_t, scalar_t>) {
      dots = grad + dim;
    } else {
      copy_elements(grad + dim, to.grad, sizes.dots());
      dots = to.grad;
    }
    for (int64_t i = 1; i < num_vectors; ++i) {
      std::memcpy(to.s + i * to.s_stride, dots, i * sizeof(value_t));
      for (int64_t j = 0; j < i; ++j) to.s[j * to.s_stride + i] = dots[j];
      dots += i;
    }
    to.s[num_vectors] = value_t(1.0f);
  }

  DLRM_INLINE void pack_group(const scalar_t* const (&members)[kPer], unit_t* to, int64_t dim) {
    if constexpr (kPer == 1) {
      copy_elements(members[0], to, dim);
    } else {
      const auto* low = reinterpret_cast<const uint16_t*>(members[0]);
      const auto* high = reinterpret_cast<const uint16_t*>(members[1]);
      auto* bits = reinterpret_cast<uint32_t*>(to);
      for (int64_t i = 0; i < dim; ++i)
        bits[i] = low[i] | uint32_t{high ? high[i] : uint16_t{0}} << 16;
    }
  }
};

// Writes kRows gradients' columns, kVecs vectors from `column` on.
template <int kRows, int kVecs, bool kStream, typename scalar_t>
DLRM_INLINE void gradient_tile(const BackwardScratch<scalar_t>& scratch, int64_t first_row,
                               int64_t column, int64_t dim, scalar_t* const* rows,
                               NextSample& next) {
  NextSample::fetch(next);
  using unit_t = Unit<scalar_t>;
  constexpr int64_t kPer = kPerUnit<unit_t>;
  Vec acc[kRows][kVecs] = {};
  const unit_t* vectors = scratch.vectors + column;
  const auto* s = scratch.s + first_row * scratch.s_stride;
  for (int64_t g = 0; g < scratch.groups; ++g) {
    Vec x[kVecs];
    for (int v = 0; v < kVecs; ++v) x[v] = load_units(vectors + v * kLanes);
    vectors += scratch.row_units;
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = broadcast_unit(s + r * scratch.s_stride);
      for (int v = 0; v < kVecs; ++v) acc[r][v] = multiply_add<unit_t>(factor, x[v], acc[r][v]);
    }
    s += kPer;
  }
  for (int v = 0; v < kVecs; ++v) {
    const int64_t begin = column + v * kLanes;
    for (int r = 0; r < kRows; ++r) {
      scalar_t* to = rows[first_row + r] + begin;
      if (begin + kLanes <= dim) {
        store<kStream>(to, acc[r][v]);
      } else {
        store_first(to, acc[r][v], dim - begin);
      }
    }
  }
}

template <int kRows, bool kStream, typename scalar_t>
DLRM_INLINE void gradient_rows(const BackwardScratch<scalar_t>& scratch, int64_t first_row,
                               int64_t dim, scalar_t* const* rows, NextSample& next) {
  constexpr int kVecs = kLanes == 16 ? 4 : 2;
  int64_t column = 0;
  for (; column + (kVecs - 1) * kLanes < dim; column += kVecs * kLanes) {
    gradient_tile<kRows, kVecs, kStream>(scratch, first_row, column, dim, rows, next);
  }
  for (; column < dim; column += kLanes) {
    gradient_tile<kRows, 1, kStream>(scratch, first_row, column, dim, rows, next);
  }
}

template <typename scalar_t>
int64_t backward_scratch_floats(const InteractionSizes& sizes) {
  return BackwardScratch<scalar_t>::floats(sizes);
}

template <typename scalar_t, bool kStream>
void backward_samples(const InteractionSizes& sizes, const scalar_t* grad, const scalar_t* dense,
                      const scalar_t* embeddings, scalar_t* grad_dense, scalar_t* grad_embeddings,
                      float* scratch_floats, scalar_t** rows, int64_t begin, int64_t end) {
  const BackwardScratch<scalar_t> scratch(sizes, scratch_floats);
  const int64_t dim = sizes.dim, num_vectors = sizes.vectors();
  const int64_t tiles = (num_vectors + 5) / 6 * ((dim + 4 * kLanes - 1) / (4 * kLanes));
  for (int64_t sample = begin; sample < end; ++sample) {
    const int64_t first = sample * sizes.tables * dim;
    BackwardScratch<scalar_t>::fill(scratch, sizes, dense + sample * dim, embeddings + first,
                                    grad + sample * sizes.width());
    rows[0] = grad_dense + sample * dim;
    for (int64_t i = 1; i < num_vectors; ++i) rows[i] = grad_embeddings + first + (i - 1) * dim;
    auto next = NextSample::of(embeddings + first + sizes.tables * dim,
                               sizes.tables * dim * sizeof(scalar_t), tiles);
    int64_t row = 0;
    for (; row + 6 <= num_vectors; row += 6)
      gradient_rows<6, kStream>(scratch, row, dim, rows, next);
    for (; row + 3 <= num_vectors; row += 3)
      gradient_rows<3, kStream>(scratch, row, dim, rows, next);
    for (; row < num_vectors; ++row) gradient_rows<1, kStream>(scratch, row, dim, rows, next);
  }
  if constexpr (kStream) finish_streaming();
}
