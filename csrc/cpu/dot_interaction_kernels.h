// Kernels of dot_interaction for one instruction set; see for_each_isa.h.
//
// A task owns a run of samples. It copies each sample once into scratch, as 32-bit units (a float,
// or a pair of bf16 where the processor multiplies such pairs), padded with zeros so that nothing
// below meets an edge, and writes each output row once.

#include "transpose.h"
#include "units.h"

// Vectors of at most so many units are narrow; four lanes are too few to gain from that.
constexpr int64_t kNarrowUnits = kLanes >= 8 ? 16 : 0;

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

// The first kLanes units of `count` values, with zeros behind the last.
template <typename unit_t, typename scalar_t>
DLRM_INLINE Vec load_some_units(const scalar_t* from, int64_t count) {
#if DLRM_BF16_DOT
  if constexpr (std::is_same_v<unit_t, BFloat16Pair>) {
    if (count >= 2 * kLanes) return load_units(from);
    return (Vec)_mm512_maskz_loadu_epi16((1u << count) - 1, from);
  }
#endif
  return load_some(from, count);
}

// Stores a vector, rounded by the processor's own instruction if it has one.
template <bool kStream = false, typename scalar_t>
DLRM_INLINE void put(scalar_t* to, Vec v) {
  if constexpr (std::is_same_v<scalar_t, BFloat16>) {
    store_bytes<kStream>(to, round_to_bfloat16(v));
  } else {
    store<kStream>(to, v);
  }
}

template <typename scalar_t>
DLRM_INLINE void put_first(scalar_t* to, Vec v, int64_t count) {
  scalar_t buffer[kLanes];
  put(buffer, v);
  copy_first(buffer, to, count);
}

// Writes `count` values from scratch, where those of a whole vector may be read.
template <typename scalar_t>
DLRM_INLINE void put_values(const float* from, scalar_t* to, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) put(to + i, load(from + i));
  if (i < count) put_first(to + i, load(from + i), count - i);
}

// Copies one vector into a row of scratch.
template <typename scalar_t, typename unit_t>
DLRM_INLINE void pack_vector(const scalar_t* from, unit_t* to, int64_t dim, int64_t row_units) {
  for (int64_t unit = 0; unit < row_units; unit += kLanes) {
    const int64_t value = unit * kPerUnit<unit_t>;
    const Vec units = load_some_units<unit_t>(from + value, dim - value);
    std::memcpy(to + unit, &units, sizeof units);
  }
}

// The scratch of forward_samples: the vectors, those of narrow ones transposed as well, and the
// dots. `columns`, `dots` and `floats` are where these begin and end, in units of 4 bytes.
template <typename scalar_t>
struct ForwardScratch {
  using unit_t = Unit<scalar_t>;

  int64_t row_units, rows;  // of the vectors, zeros included
  int64_t depth;            // units of a vector
  bool narrow;

  explicit ForwardScratch(const InteractionSizes& sizes)
      : row_units(round_up(sizes.dim, kLanes * kPerUnit<unit_t>) / kPerUnit<unit_t>),
        rows(round_up(sizes.vectors(), kLanes)),
        depth((sizes.dim + kPerUnit<unit_t> - 1) / kPerUnit<unit_t>),
        narrow(row_units <= kNarrowUnits) {}

  int64_t columns() const { return rows * row_units; }
  int64_t dots() const { return columns() + (narrow ? row_units * rows : 0); }
  int64_t floats() const { return dots() + rows * (rows + 1) / 2 + kLanes; }
};
template <typename scalar_t>
int64_t forward_scratch_floats(const InteractionSizes& sizes) {
  return ForwardScratch<scalar_t>(sizes).floats();
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

// kRows rows of dots, each with kVectors * kLanes vectors, which lie side by side in `columns`.
template <typename unit_t, int kRows, int kVectors>
DLRM_INLINE void dots_of_columns(const unit_t* vectors, int64_t row_units, const unit_t* columns,
                                 int64_t stride, int64_t depth, int64_t row, float* dots) {
  Vec acc[kRows][kVectors] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vec x[kVectors];
    for (int v = 0; v < kVectors; ++v) x[v] = load_units(columns + k * stride + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec value = broadcast_unit(vectors + (row + r) * row_units + k);
      for (int v = 0; v < kVectors; ++v) acc[r][v] = multiply_add<unit_t>(value, x[v], acc[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      store(dots + (row + r) * (row + r - 1) / 2 + v * kLanes, acc[r][v]);
    }
  }
}

// Right to left, so that values behind a row's end are overwritten as above.
template <typename unit_t, int kRows>
DLRM_INLINE void rows_of_dots(const unit_t* vectors, int64_t row_units, const unit_t* columns,
                              int64_t stride, int64_t depth, int64_t row, float* dots) {
  int64_t column = round_up(row + kRows - 1, kLanes);
  if (column % (2 * kLanes) != 0) {
    column -= kLanes;
    dots_of_columns<unit_t, kRows, 1>(vectors, row_units, columns + column, stride, depth, row,
                                      dots + column);
  }
  while (column > 0) {
    column -= 2 * kLanes;
    dots_of_columns<unit_t, kRows, 2>(vectors, row_units, columns + column, stride, depth, row,
                                      dots + column);
  }
}

// The same for narrow vectors, which are transposed first: each lane then sums one dot. Sums over
// lanes would take longer than the products.
template <typename scalar_t, typename unit_t>
void narrow_triangle(const ForwardScratch<scalar_t>& scratch, const unit_t* vectors,
                     int64_t num_vectors, unit_t* columns, float* dots, NextSample next) {
  for (int64_t j = 0; j < num_vectors; j += kLanes) {
    for (int64_t k = 0; k < scratch.row_units; k += kLanes) {
      Vec block[kLanes];
      for (int64_t r = 0; r < kLanes; ++r) {
        block[r] = load_units(vectors + (j + r) * scratch.row_units + k);
      }
      transpose(block);
      for (int64_t r = 0; r < kLanes; ++r) {
        std::memcpy(columns + (k + r) * scratch.rows + j, &block[r], sizeof(Vec));
      }
    }
  }
  const auto multiply = [&](auto count, int64_t row) DLRM_ALWAYS_INLINE {
    NextSample::fetch(next);
    rows_of_dots<unit_t, decltype(count)::value>(vectors, scratch.row_units, columns, scratch.rows,
                                                 scratch.depth, row, dots);
  };
  // No tile has more vectors of columns than its first row needs.
  for (int64_t row = 1; row < num_vectors;) {
    const int64_t count = std::min(num_vectors, round_up(row, kLanes) + 1) - row;
    if (count >= 6) {
      multiply(std::integral_constant<int, 6>(), row);
      row += 6;
    } else if (count >= 4) {
      multiply(std::integral_constant<int, 4>(), row);
      row += 4;
    } else {
      multiply(std::integral_constant<int, 1>(), row);
      row += 1;
    }
  }
}

template <typename scalar_t>
void forward_samples(const InteractionSizes& sizes, const scalar_t* dense,
                     const scalar_t* embeddings, scalar_t* output, float* floats, int64_t begin,
                     int64_t end) {
  using unit_t = Unit<scalar_t>;
  const int64_t dim = sizes.dim, width = sizes.width();
  const ForwardScratch<scalar_t> scratch(sizes);
  auto* vectors = reinterpret_cast<unit_t*>(floats);
  float* dots = floats + scratch.dots();
  const int64_t tiles = scratch.narrow
                            ? sizes.vectors() / 4 + 1
                            : std::max<int64_t>(1, sizes.dots() / (kTileRows * kTileColumns));
  for (int64_t sample = begin; sample < end; ++sample) {
    pack_vector(dense + sample * dim, vectors, dim, scratch.row_units);
    for (int64_t table = 0; table < sizes.tables; ++table) {
      pack_vector(embeddings + (sample * sizes.tables + table) * dim,
                  vectors + (table + 1) * scratch.row_units, dim, scratch.row_units);
    }
    const auto next = NextSample::of(embeddings + (sample + 1) * sizes.tables * dim,
                                     sizes.tables * dim * sizeof(scalar_t), tiles);
    if (scratch.narrow) {
      narrow_triangle(scratch, vectors, sizes.vectors(), vectors + scratch.columns(), dots, next);
    } else {
      lower_triangle(vectors, scratch.row_units, sizes.vectors(), dots, next);
    }
    scalar_t* row = output + sample * width;
    copy_elements(dense + sample * dim, row, dim);
    put_values(dots, row + dim, sizes.dots());
    for (int64_t i = dim + sizes.dots(); i < width; ++i) row[i] = scalar_t(0.0f);
  }
}

constexpr int64_t kGradientRows = 6;  // of a tile: the gradients of so many vectors

// The gradient of vector i is the sum over j of s[i][j] * vector j, where s is the symmetric matrix
// of the dots' gradients; vector 0 has the output's first `dim` gradients besides. Those are packed
// behind the vectors as one more, `n`, with s[0][n] = 1.
template <typename scalar_t>
struct BackwardScratch {
  using unit_t = Unit<scalar_t>;
  using value_t = Value<unit_t>;
  static constexpr int64_t kPer = kPerUnit<unit_t>;
  static constexpr int64_t kValues = kLanes * kPer;  // of a vector

  int64_t groups;     // of kPer vectors, interleaved: a unit holds one element of each
  int64_t row_units;  // of a group
  int64_t stride;     // values of a row of `lower`, units of a row of `across`
  unit_t* vectors;
  value_t* lower;  // s[i][j] for j < i, row after row
  unit_t* across;  // for each group of j: s[i][j] for i up to the last row of j's tile
  value_t* dots;   // the gradients of dots, row after row, then s[n][j]

  BackwardScratch(const InteractionSizes& sizes, float* scratch)
      : groups((sizes.vectors() + 1 + kPer - 1) / kPer),
        row_units(round_up(sizes.dim, kLanes)),
        stride(round_up(sizes.vectors() + kGradientRows, kValues)),
        vectors(reinterpret_cast<unit_t*>(scratch)),
        lower(reinterpret_cast<value_t*>(vectors + groups * row_units)),
        across(reinterpret_cast<unit_t*>(lower) + sizes.vectors() * stride / kPer),
        dots(reinterpret_cast<value_t*>(across + groups * stride)) {}

  static int64_t floats(const InteractionSizes& sizes) {
    const BackwardScratch scratch(sizes, nullptr);
    const int64_t n = sizes.vectors(), rows = (n + 2) * (n + 1) / 2;
    return scratch.groups * (scratch.row_units + scratch.stride) + n * scratch.stride / kPer +
           (rows + kPer - 1) / kPer + 2 * kLanes;
  }

  // One sample's inputs.
  DLRM_INLINE void fill(const BackwardScratch& to, const InteractionSizes& sizes,
                        const scalar_t* dense, const scalar_t* embeddings, const scalar_t* grad) {
    const int64_t dim = sizes.dim, n = sizes.vectors();
    const auto member = [&](int64_t i) DLRM_ALWAYS_INLINE {
      return i == 0 ? dense : i < n ? embeddings + (i - 1) * dim : grad;
    };
    for (int64_t g = 0; g < to.groups; ++g) {
      const int64_t i = g * kPer;
      pack_group(member(i), i + 1 > n ? nullptr : member(i + 1), to.vectors + g * to.row_units,
                 dim);
    }
    copy_elements(grad + dim, to.dots, sizes.dots());
    to.dots[sizes.dots()] = value_t(1.0f);
    for (int64_t i = 1; i < n; ++i) {
      for (int64_t j = 0; j < i; j += kValues) {
        const Vec values = load_units(reinterpret_cast<const unit_t*>(row_of(to, i) + j));
        std::memcpy(to.lower + i * to.stride + j, &values, sizeof values);
      }
    }
    for (int64_t g = 0; g < to.groups; ++g) fill_across(to, g, n);
  }

  DLRM_INLINE value_t* row_of(const BackwardScratch& to, int64_t i) {
    return to.dots + i * (i - 1) / 2;
  }

  DLRM_INLINE void fill_across(const BackwardScratch& to, int64_t g, int64_t n) {
    const int64_t j = g * kPer;
    unit_t* across = to.across + g * to.stride;
    const value_t *row = row_of(to, j), *next = row_of(to, j + 1);
    for (int64_t i = 0; i < j; i += kLanes) {
      Vec units;
      if constexpr (kPer == 1) {
        units = load(row + i);
      } else {
        units = interleave(load(row + i), load(next + i));
      }
      std::memcpy(across + i, &units, sizeof units);
    }
    auto* values = reinterpret_cast<value_t*>(across + j);
    values[0] = value_t(0.0f);
    if constexpr (kPer == 2) {
      values[1] = values[2] = next[j];
      values[3] = value_t(0.0f);
    }
    for (int64_t i = j + kPer; i < std::min(n, j + kPer + kGradientRows - 1); ++i) {
      std::memcpy(across + i, to.lower + i * to.stride + j, sizeof(unit_t));
    }
  }

  // Pairs of the bf16 values that two vectors hold.
  DLRM_INLINE Vec interleave(Vec low, Vec high) { return (Vec)((Bits)low >> 16 | (Bits)high); }

  DLRM_INLINE void pack_group(const scalar_t* low, const scalar_t* high, unit_t* to, int64_t dim) {
    for (int64_t i = 0; i < dim; i += kLanes) {
      Vec units = load_some(low + i, dim - i);
      if constexpr (kPer == 2) {
        units = interleave(units, high == nullptr ? zero() : load_some(high + i, dim - i));
      }
      std::memcpy(to + i, &units, sizeof units);
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
  Vec acc[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) acc[r][v] = zero();
  }
  const unit_t* vectors = scratch.vectors + column;
  const auto add = [&](const auto* s, int64_t stride) DLRM_ALWAYS_INLINE {
    Vec x[kVecs];
    for (int v = 0; v < kVecs; ++v) x[v] = load_units(vectors + v * kLanes);
    vectors += scratch.row_units;
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = broadcast_unit(s + r * stride);
      for (int v = 0; v < kVecs; ++v) acc[r][v] = multiply_add<unit_t>(factor, x[v], acc[r][v]);
    }
  };
  int64_t g = 0;
  for (; g < first_row / kPer; ++g) {
    add(scratch.lower + first_row * scratch.stride + g * kPer, scratch.stride);
  }
  for (; g < scratch.groups; ++g) add(scratch.across + g * scratch.stride + first_row, 1);
  for (int v = 0; v < kVecs; ++v) {
    const int64_t begin = column + v * kLanes;
    for (int r = 0; r < kRows; ++r) {
      scalar_t* to = rows[first_row + r] + begin;
      if (begin + kLanes <= dim) {
        put<kStream>(to, acc[r][v]);
      } else {
        put_first(to, acc[r][v], dim - begin);
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
  const int64_t tiles =
      (num_vectors + kGradientRows - 1) / kGradientRows * ((dim + 4 * kLanes - 1) / (4 * kLanes));
  for (int64_t sample = begin; sample < end; ++sample) {
    const int64_t first = sample * sizes.tables * dim;
    BackwardScratch<scalar_t>::fill(scratch, sizes, dense + sample * dim, embeddings + first,
                                    grad + sample * sizes.width());
    rows[0] = grad_dense + sample * dim;
    for (int64_t i = 1; i < num_vectors; ++i) rows[i] = grad_embeddings + first + (i - 1) * dim;
    auto next = NextSample::of(embeddings + first + sizes.tables * dim,
                               sizes.tables * dim * sizeof(scalar_t), tiles);
    int64_t row = 0;
    for (; row + kGradientRows <= num_vectors; row += kGradientRows)
      gradient_rows<kGradientRows, kStream>(scratch, row, dim, rows, next);
    for (; row + 3 <= num_vectors; row += 3)
      gradient_rows<3, kStream>(scratch, row, dim, rows, next);
    for (; row < num_vectors; ++row) gradient_rows<1, kStream>(scratch, row, dim, rows, next);
  }
  if constexpr (kStream) finish_streaming();
}
