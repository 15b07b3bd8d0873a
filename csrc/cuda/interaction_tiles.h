// How the vectors of one sample, in shared memory, are multiplied: by tensor cores, or plainly.
//
// Both give dots(..., f), which calls f(i, j, dot) at least for the dots of vectors i > j, and
// combine(..., f), which calls f<count>(i, column, values) for `count` elements of row i of the
// product of the matrix and the vectors. Rows and columns may be some that pad.
#pragma once

#include "runtime.h"
#include "vectors.h"

#ifndef DLRM_EMULATE_CUDA
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>
#endif

// Whether the code being compiled is for tensor cores with bfloat16 and TF32.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define DLRM_AMPERE 1
#else
#define DLRM_AMPERE 0
#endif

namespace dlrm {

// What tensor cores take for an element: its type, their own name for it, how many they add up at
// once, and from which compute capability on.
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

// Products of 16 x 16 tiles by tensor cores, each tile by one warp, with sums in float32.
template <typename scalar_t>
struct TensorCores {
  using shared_t = scalar_t;
  using Type = TileType<scalar_t>;

  static constexpr int kTile = 16;
  static constexpr int kCapability = Type::kCapability;
  static constexpr int kPadding = kElementsOf16Bytes<scalar_t>;  // rows begin in other banks
  static constexpr int kScratchStride = kTile + 4;
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
    const int tiles = rows(num_vectors) / kTile, depth = columns(dim);
    for (int row = 0, index = 0; row < tiles; ++row) {
      for (int column = 0; column <= row; ++column, ++index) {
        if (index % (Owner::kThreads / kWarp) != owner.warp) continue;
        float* tile = scratch + owner.warp * (kScratchBytes / sizeof(float));
        multiply<nvcuda::wmma::col_major>(vectors + row * kTile * stride, stride, 1,
                                          vectors + column * kTile * stride, stride, 1, depth,
                                          tile);
        for (int e = owner.lane; e < kTile * kTile; e += kWarp) {
          f(row * kTile + e / kTile, column * kTile + e % kTile,
            tile[e / kTile * kScratchStride + e % kTile]);
        }
        __syncwarp();
      }
    }
  }

  template <typename Owner, typename Function>
  static __device__ void combine(const Owner& owner, const shared_t* matrix, int matrix_stride,
                                 const shared_t* vectors, int stride, int num_vectors, int dim,
                                 float* scratch, const Function& f) {
    constexpr int kCount = kElementsOf16Bytes<scalar_t>;
    const int tile_rows = rows(num_vectors) / kTile, tile_columns = columns(dim) / kTile;
    for (int index = owner.warp; index < tile_rows * tile_columns;
         index += Owner::kThreads / kWarp) {
      const int row = index / tile_columns * kTile, column = index % tile_columns * kTile;
      float* tile = scratch + owner.warp * (kScratchBytes / sizeof(float));
      multiply<nvcuda::wmma::row_major>(matrix + row * matrix_stride, matrix_stride, 1,
                                        vectors + column, stride, stride, tile_rows * kTile, tile);
      for (int e = owner.lane * kCount; e < kTile * kTile; e += kWarp * kCount) {
        float values[kCount];
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          values[k] = tile[e / kTile * kScratchStride + e % kTile + k];
        }
        f.template operator()<kCount>(row + e / kTile, column + e % kTile, values);
      }
      __syncwarp();
    }
  }

 private:
  // A warp multiplies a tile's rows with another's columns and writes the tile to `to`. Steps are
  // how far the factors of the next product lie behind, in elements.
  template <typename RightLayout>
  static __device__ void multiply(const shared_t* left, int left_stride, int left_step,
                                  const shared_t* right, int right_stride, int right_step,
                                  int depth, float* to) {
    if constexpr (Type::kCompiled) {
      namespace wmma = nvcuda::wmma;
      using name = typename Type::name;
      using element = const typename Type::shared_t*;
      constexpr int kDepth = Type::kDepth;
      wmma::fragment<wmma::matrix_a, kTile, kTile, kDepth, name, wmma::row_major> a;
      wmma::fragment<wmma::matrix_b, kTile, kTile, kDepth, name, RightLayout> b;
      wmma::fragment<wmma::accumulator, kTile, kTile, kDepth, float> sums;
      wmma::fill_fragment(sums, 0.0f);
      for (int k = 0; k < depth; k += kDepth) {
        wmma::load_matrix_sync(a, reinterpret_cast<element>(left + k * left_step), left_stride);
        wmma::load_matrix_sync(b, reinterpret_cast<element>(right + k * right_step), right_stride);
        wmma::mma_sync(sums, a, b, sums);
      }
      wmma::store_matrix_sync(to, sums, kScratchStride, wmma::mem_row_major);
      __syncwarp();
    }
  }
};

// Products in float32 by the threads, each of which owns 4 x 4 elements.
struct PlainFloats {
  using shared_t = float;

  static constexpr int kTile = 4;
  static constexpr int kPadding = 4;
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
