// Multiplies the vectors of one sample in shared memory, with tensor cores or with plain
// arithmetic.
//
// Both engines have dots(..., f), which calls f(i, j, dot) at least for the dots of vectors i > j,
// and combine(..., f), which calls f<count>(i, column, values) for `count` elements of row i of the
// product of the matrix and the vectors. Rows and columns may be padding.
#pragma once

#include "runtime.h"
#include "vectors.h"

#ifndef DLRM_EMULATE_CUDA
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline_primitives.h>
#include <mma.h>
#endif

// Whether the code being compiled is for tensor cores with bfloat16 and TF32.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define DLRM_AMPERE 1
#else
#define DLRM_AMPERE 0
#endif

namespace dlrm {

// How tensor cores represent an element: its type, the type of a fragment, the depth of a product,
// and the lowest compute capability that supports it.
template <typename scalar_t>
struct TileType;

template <>
struct TileType<Half> {
  static constexpr int kDepth = 16;
  static constexpr int kCapability = 70;
  static constexpr bool kCompiled = true;
#ifdef DLRM_EMULATE_CUDA
  using shared_t = Half;
  using name = Half;
#else
  using shared_t = __half;
  using name = __half;
#endif
};
template <>
struct TileType<BFloat16> {
  static constexpr int kDepth = 16;
  static constexpr int kCapability = 80;
  static constexpr bool kCompiled = DLRM_AMPERE;
#ifdef DLRM_EMULATE_CUDA
  using shared_t = BFloat16;
  using name = BFloat16;
#else
  using shared_t = __nv_bfloat16;
  using name = __nv_bfloat16;
#endif
};
template <>
struct TileType<float> {
  static constexpr int kDepth = 8;
  static constexpr int kCapability = 80;
  static constexpr bool kCompiled = DLRM_AMPERE;
  using shared_t = float;
#if DLRM_AMPERE
  using name = nvcuda::wmma::precision::tf32;
#endif
};

// Multiplies 16 x 16 tiles with tensor cores, one warp a tile, and sums in float32.
template <typename scalar_t>
struct TensorCores {
  using shared_t = scalar_t;
  using Type = TileType<scalar_t>;

  static constexpr int kTile = 16;
  static constexpr int kCapability = Type::kCapability;
  static constexpr int kPadding =
      kElementsOf16Bytes<scalar_t>;  // so that rows begin in different banks
  static constexpr bool kCasts = std::is_same_v<scalar_t, float>;
  static constexpr int kScratchStride = kTile + 8;  // four rows written at once use different banks
  static constexpr int64_t kScratchBytes = kTile * kScratchStride * sizeof(float);  // of a warp

  template <typename Integer>
  static constexpr __host__ __device__ Integer rows(Integer vectors) {
    return (vectors + kTile - 1) / kTile * kTile;
  }
  template <typename Integer>
  static constexpr __host__ __device__ Integer columns(Integer dim) {
    return rows(dim);
  }

  // Float32 to the nearest TF32, halfway cases away from zero: 10 bits of fraction.
  static __device__ float cast(float value) {
    const auto bits = static_cast<uint32_t>(__float_as_int(value));
    if ((bits & 0x7f800000u) == 0x7f800000u) return value;
    return __int_as_float(static_cast<int>((bits + 0x1000u) & 0xffffe000u));
  }

  template <typename Owner, typename Function>
  static __device__ void dots(const Owner& owner, const shared_t* vectors, int stride,
                              int num_vectors, int dim, float* scratch, const Function& f) {
    constexpr int kSide = side_of<Owner>;
    const int tiles = rows(num_vectors) / kTile;
    const Factor factor{vectors, stride, kTile * stride, 1, tiles};
    for (int row = 0, index = 0; row < tiles; row += kSide) {
      for (int column = 0; column <= row; column += kSide, ++index) {
        if (index % (Owner::kThreads / kWarp) != owner.warp) continue;
        multiply<kSide, nvcuda::wmma::col_major>(
            factor, row, factor, column, columns(dim),
            scratch + owner.warp * (kScratchBytes / sizeof(float)),
            [&](int tile_row, int tile_column, const float* tile) {
              if (tile_column > tile_row) return;
#pragma unroll
              for (int e = 0; e < kTile * kTile; e += kWarp) {
                const int i = (e + owner.lane) / kTile, j = owner.lane % kTile;
                f(tile_row * kTile + i, tile_column * kTile + j, tile[i * kScratchStride + j]);
              }
            });
      }
    }
  }

  template <typename Owner, typename Function>
  static __device__ void combine(const Owner& owner, const shared_t* matrix, int matrix_stride,
                                 const shared_t* vectors, int stride, int num_vectors, int dim,
                                 float* scratch, const Function& f) {
    constexpr int kSide = side_of<Owner>, kCount = kElementsOf16Bytes<scalar_t>;
    const int tile_rows = rows(num_vectors) / kTile, tile_columns = columns(dim) / kTile;
    const Factor left{matrix, matrix_stride, kTile * matrix_stride, 1, tile_rows};
    const Factor right{vectors, stride, kTile, stride, tile_columns};
    for (int row = 0, index = 0; row < tile_rows; row += kSide) {
      for (int column = 0; column < tile_columns; column += kSide, ++index) {
        if (index % (Owner::kThreads / kWarp) != owner.warp) continue;
        multiply<kSide, nvcuda::wmma::row_major>(
            left, row, right, column, tile_rows * kTile,
            scratch + owner.warp * (kScratchBytes / sizeof(float)),
            [&](int tile_row, int tile_column, const float* tile) {
#pragma unroll
              for (int e = 0; e < kTile * kTile; e += kWarp * kCount) {
                const int i = (e + owner.lane * kCount) / kTile, j = owner.lane * kCount % kTile;
                Elements<float, kCount> elements;
                elements.load(tile + i * kScratchStride + j);
                float values[kCount];
                elements.get(values);
                f.template operator()<kCount>(tile_row * kTile + i, tile_column * kTile + j,
                                              values);
              }
            });
      }
    }
  }

 private:
  // A warp multiplies this many tiles in each dimension at once, so each loaded tile is used as
  // often. Samples whose tiles are divided among warps may have too few tiles for that.
  template <typename Owner>
  static constexpr int side_of = Owner::kThreads == kWarp ? 2 : 1;

  // One factor of a product: the beginnings of its `tiles` and their parts for each step of depth.
  struct Factor {
    const shared_t* data;
    int stride, tile_step, depth_step, tiles;

    __device__ const shared_t* at(int tile, int depth) const {
      return data + min(tile, tiles - 1) * tile_step + depth * depth_step;
    }
  };

  // A warp multiplies kSide tiles of the left factor by kSide tiles of the right one, and calls
  // f(left tile, right tile, product) for those that exist.
  template <int kSide, typename RightLayout, typename Function>
  static __device__ void multiply(const Factor& left, int row, const Factor& right, int column,
                                  int depth, float* product, const Function& f) {
    if constexpr (Type::kCompiled) {
      namespace wmma = nvcuda::wmma;
      using name = typename Type::name;
      using element = const typename Type::shared_t*;
      constexpr int kDepth = Type::kDepth;
      wmma::fragment<wmma::matrix_a, kTile, kTile, kDepth, name, wmma::row_major> a[kSide];
      wmma::fragment<wmma::matrix_b, kTile, kTile, kDepth, name, RightLayout> b[kSide];
      wmma::fragment<wmma::accumulator, kTile, kTile, kDepth, float> sums[kSide][kSide];
#pragma unroll
      for (int r = 0; r < kSide; ++r) {
#pragma unroll
        for (int c = 0; c < kSide; ++c) wmma::fill_fragment(sums[r][c], 0.0f);
      }
      for (int k = 0; k < depth; k += kDepth) {
#pragma unroll
        for (int t = 0; t < kSide; ++t) {
          const shared_t* left_tile = left.at(row + t, k);
          const shared_t* right_tile = right.at(column + t, k);
          wmma::load_matrix_sync(a[t], reinterpret_cast<element>(left_tile), left.stride);
          wmma::load_matrix_sync(b[t], reinterpret_cast<element>(right_tile), right.stride);
        }
#pragma unroll
        for (int r = 0; r < kSide; ++r) {
#pragma unroll
          for (int c = 0; c < kSide; ++c) wmma::mma_sync(sums[r][c], a[r], b[c], sums[r][c]);
        }
      }
#pragma unroll
      for (int r = 0; r < kSide; ++r) {
#pragma unroll
        for (int c = 0; c < kSide; ++c) {
          if (row + r >= left.tiles || column + c >= right.tiles) continue;
          wmma::store_matrix_sync(product, sums[r][c], kScratchStride, wmma::mem_row_major);
          __syncwarp();
          f(row + r, column + c, product);
          __syncwarp();
        }
      }
    }
  }
};

// Multiplies in float32; each thread owns 4 x 4 elements of the product.
struct PlainFloats {
  using shared_t = float;

  static constexpr int kTile = 4;
  static constexpr int kPadding = 4;
  static constexpr bool kCasts = false;
  static constexpr int64_t kScratchBytes = 0;

  template <typename Integer>
  static constexpr __host__ __device__ Integer rows(Integer vectors) {
    return (vectors + kTile - 1) / kTile * kTile;
  }
  template <typename Integer>
  static constexpr __host__ __device__ Integer columns(Integer dim) {
    return rows(dim);
  }
  static __device__ float cast(float value) { return value; }

  template <typename Owner, typename Function>
  static __device__ void dots(const Owner& owner, const float* vectors, int stride, int num_vectors,
                              int dim, float*, const Function& f) {
    const int tiles = rows(num_vectors) / kTile, depth = columns(dim);
    for (int index = owner.thread; index < tiles * (tiles + 1) / 2; index += Owner::kThreads) {
      int row = 0, column = index;
      while (column > row) column -= ++row;
      const float* left = vectors + row * kTile * stride;
      const float* right = vectors + column * kTile * stride;
      float sums[kTile][kTile] = {};
      for (int k = 0; k < depth; k += 4) {
        float a[kTile][4], b[kTile][4];
#pragma unroll
        for (int i = 0; i < kTile; ++i) {
          read(left + i * stride + k, a[i]);
          read(right + i * stride + k, b[i]);
        }
#pragma unroll
        for (int i = 0; i < kTile; ++i) {
#pragma unroll
          for (int j = 0; j < kTile; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[i][j] += a[i][e] * b[j][e];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kTile; ++i) {
#pragma unroll
        for (int j = 0; j < kTile; ++j) f(row * kTile + i, column * kTile + j, sums[i][j]);
      }
    }
  }

  template <typename Owner, typename Function>
  static __device__ void combine(const Owner& owner, const float* matrix, int matrix_stride,
                                 const float* vectors, int stride, int num_vectors, int dim, float*,
                                 const Function& f) {
    const int tile_rows = rows(num_vectors) / kTile, tile_columns = columns(dim) / kTile;
    for (int index = owner.thread; index < tile_rows * tile_columns; index += Owner::kThreads) {
      const int row = index / tile_columns * kTile, column = index % tile_columns * kTile;
      float sums[kTile][kTile] = {};
      for (int k = 0; k < num_vectors; ++k) {
        float a[4], b[4];
        read(matrix + k * matrix_stride + row, a);  // it is symmetric
        read(vectors + k * stride + column, b);
#pragma unroll
        for (int i = 0; i < kTile; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[i][j] += a[i] * b[j];
        }
      }
#pragma unroll
      for (int i = 0; i < kTile; ++i) f.template operator()<4>(row + i, column, sums[i]);
    }
  }

 private:
  static __device__ void read(const float* from, float* values) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    values[0] = four.x;
    values[1] = four.y;
    values[2] = four.z;
    values[3] = four.w;
  }
};

}  // namespace dlrm
