#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "../dot_interaction.h"
#include "interaction_tiles.h"
#include "runtime.h"
#include "vectors.h"

namespace dlrm {
namespace {

constexpr int kInteractionWarps = 4;     // of a block
constexpr int kMostVectorsOfAWarp = 48;  // of a sample owned by a warp; a block owns larger ones
constexpr int kLargeThreads = 128;

template <typename scalar_t>
struct Interaction {
  const scalar_t* dense;
  const scalar_t* embeddings;
  int64_t batch, tables, dim, width;
  bool aligned;  // all rows can be read and written 16 bytes at a time

  __device__ int64_t vectors() const { return tables + 1; }
  __device__ const scalar_t* vector(int64_t sample, int64_t i) const {
    return i == 0 ? dense + sample * dim : embeddings + (sample * tables + i - 1) * dim;
  }
};

// The destination of the vectors' gradients.
template <typename scalar_t>
struct Gradients {
  scalar_t* dense;
  scalar_t* embeddings;

  __device__ scalar_t* vector(const Interaction<scalar_t>& sizes, int64_t sample, int64_t i) const {
    return i == 0 ? dense + sample * sizes.dim
                  : embeddings + (sample * sizes.tables + i - 1) * sizes.dim;
  }
};

template <typename Integer>
__device__ Integer first_dot_of(Integer row) {
  using Unsigned = std::make_unsigned_t<Integer>;  // so that halving is a shift
  return static_cast<Integer>(static_cast<Unsigned>(row) * static_cast<Unsigned>(row - 1) / 2);
}

// The threads that own a sample: a warp or a whole block.
template <int kWarps>
struct Owners {
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kSamples = kInteractionWarps / kWarps;  // of a block

  int warp = kWarps == 1 ? 0 : static_cast<int>(threadIdx.y);  // of the sample's
  int lane = static_cast<int>(threadIdx.x);
  int thread = warp * kWarp + lane;
  int index = kWarps == 1 ? static_cast<int>(threadIdx.y) : 0;
  int64_t sample = int64_t{blockIdx.x} * kSamples + index;

  __device__ Owners() {}
  __device__ void sync() const {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
};

// The layout of a sample's shared memory, in bytes from its beginning.
struct Places {
  int stride;       // of the vectors, in elements
  int dots_stride;  // of the matrix of the dots' gradients, in elements
  int row, dots, scratch, bytes;
};

inline Places places(int64_t vectors_bytes, int64_t stride, int64_t row_bytes, int64_t dots_bytes,
                     int64_t dots_stride, int64_t scratch_bytes) {
  const auto rounded = [](int64_t bytes) { return ceil_div(bytes, 128) * 128; };
  const int64_t row = rounded(vectors_bytes), dots = row + rounded(row_bytes);
  const int64_t scratch = dots + rounded(dots_bytes), bytes = scratch + rounded(scratch_bytes);
  if (bytes > 1 << 20) return {0, 0, 0, 0, 0, 1 << 20};  // more than any device has
  return {static_cast<int>(stride), static_cast<int>(dots_stride), static_cast<int>(row),
          static_cast<int>(dots),   static_cast<int>(scratch),     static_cast<int>(bytes)};
}

// Calls f(index, row, part) for all parts of all rows, numbered row by row; each part is handled by
// one of the owner's threads. The loop avoids division, for which GPUs have no instruction.
template <typename Owner, typename Function>
__device__ void for_each_part(const Owner& owner, int rows, int parts, const Function& f) {
  const unsigned divisor = parts, first = owner.thread, threads = Owner::kThreads;
  const int more_rows = threads / divisor, more_parts = threads % divisor;
  int row = first / divisor, part = first % divisor;
  for (int index = owner.thread; row < rows; index += Owner::kThreads) {
    f(index, row, part);
    row += more_rows;
    part += more_parts;
    if (part >= parts) {
      part -= parts;
      ++row;
    }
  }
}

// Copies elements to shared memory. Copies of 16 bytes are asynchronous: many are in flight at
// once, they need no registers, and they are complete after __pipeline_wait_prior and a barrier.
template <int kCount, typename scalar_t, typename shared_t>
__device__ void copy_part(const scalar_t* from, shared_t* to) {
  if constexpr (!std::is_same_v<scalar_t, shared_t>) {
    Elements<scalar_t, kCount> elements;
    elements.load(from);
    float values[kCount];
    elements.get(values);
    Elements<shared_t, kCount> cast;
    cast.set(values);
    cast.store(to);
  } else if constexpr (kCount == kElementsOf16Bytes<scalar_t>) {
    __pipeline_memcpy_async(to, from, 16);
  } else {
    static_assert(kCount == 1);
    *to = *from;
  }
}

// Copies a row to shared memory with copy_part.
template <typename scalar_t, typename shared_t, typename Owner>
__device__ void load_row(const Owner& owner, const scalar_t* from, shared_t* to, int size,
                         bool aligned) {
  const auto load = [&]<int kCount>() {
#pragma unroll 2
    for (int i = owner.thread * kCount; i < size; i += Owner::kThreads * kCount) {
      copy_part<kCount>(from + i, to + i);
    }
  };
  if (aligned) {
    load.template operator()<kElementsOf16Bytes<scalar_t>>();
  } else {
    load.template operator()<1>();
  }
}

// Copies a sample's vectors to shared memory with copy_part, and pads them with zeros to the rows
// and columns that the engine multiplies.
template <typename Engine, typename scalar_t, typename Owner>
__device__ void load_vectors(const Interaction<scalar_t>& in, const Owner& owner,
                             typename Engine::shared_t* to, int stride) {
  using shared_t = typename Engine::shared_t;
  const int vectors = static_cast<int>(in.vectors()), dim = static_cast<int>(in.dim);
  load_row(owner, in.vector(owner.sample, 0), to, dim, in.aligned);
  const scalar_t* embeddings = in.vector(owner.sample, 1);
  const auto load = [&]<int kCount>() {
    for_each_part(owner, vectors - 1, dim / kCount, [&](int index, int row, int part) {
      copy_part<kCount>(embeddings + index * kCount, to + (row + 1) * stride + part * kCount);
    });
  };
  if (in.aligned) {
    load.template operator()<kElementsOf16Bytes<scalar_t>>();
  } else {
    load.template operator()<1>();
  }
  constexpr int kZeros = kElementsOf16Bytes<shared_t>;
  const int rows = Engine::rows(vectors), columns = Engine::columns(dim);
  for (int row = owner.thread; row < vectors && dim < columns; row += Owner::kThreads) {
#pragma unroll 1
    for (int i = dim; i < columns; ++i) to[row * stride + i] = static_cast<shared_t>(0.0f);
  }
#pragma unroll 1
  for (int i = vectors * stride + owner.thread * kZeros; i < rows * stride;
       i += Owner::kThreads * kZeros) {
    Elements<shared_t, kZeros> zeros;
    zeros.clear();
    zeros.store(to + i);
  }
}

// Waits until the vectors have arrived and casts them to the engine's type.
template <typename Engine, typename scalar_t, typename Owner>
__device__ void finish_vectors(const Interaction<scalar_t>& in, const Owner& owner,
                               typename Engine::shared_t* vectors, int stride) {
  __pipeline_wait_prior(0);
  owner.sync();
  if constexpr (Engine::kCasts) {
    constexpr int kVector = kElementsOf16Bytes<scalar_t>;
    const int dim = static_cast<int>(in.dim);
    for_each_part(owner, static_cast<int>(in.vectors()), Engine::columns(dim) / kVector,
                  [&](int, int row, int part) {
                    Elements<scalar_t, kVector> elements;
                    elements.load(vectors + row * stride + part * kVector);
                    float values[kVector];
                    elements.get(values);
#pragma unroll
                    for (int k = 0; k < kVector; ++k) values[k] = Engine::cast(values[k]);
                    elements.set(values);
                    elements.store(vectors + row * stride + part * kVector);
                  });
    owner.sync();
  }
}

// Copies the dense vector, and the zeros after the dots, to a row of the output with copy_part.
template <typename scalar_t, typename Owner>
__device__ void fill_row(const Interaction<scalar_t>& in, const Owner& owner, scalar_t* row) {
  const int dim = static_cast<int>(in.dim), width = static_cast<int>(in.width);
  load_row(owner, in.vector(owner.sample, 0), row, dim, in.aligned);
  const int end = dim + first_dot_of(static_cast<int>(in.vectors()));
  for (int i = end + owner.thread; i < width; i += Owner::kThreads) {
    row[i] = static_cast<scalar_t>(0.0f);
  }
}

// Writes a row of the output, whose size is a multiple of 16 bytes.
template <typename scalar_t, typename Owner>
__device__ void store_row(const Owner& owner, const scalar_t* from, scalar_t* to, int width) {
  constexpr int kVector = kElementsOf16Bytes<scalar_t>;
#pragma unroll 2
  for (int i = owner.thread * kVector; i < width; i += Owner::kThreads * kVector) {
    Elements<scalar_t, kVector> elements;
    elements.load(from + i);
    elements.store(to + i);
  }
}

// A warp or a block owns a sample. It reads the vectors into shared memory once, 16 bytes a thread;
// tensor cores or the threads (Engine) multiply only the tiles of the lower triangle; and it writes
// the whole row of the output once, 16 bytes a thread.
template <typename scalar_t, typename Engine, int kWarps>
__global__ void __launch_bounds__(kInteractionWarps* kWarp)
    forward_samples(Interaction<scalar_t> in, scalar_t* output, Places places) {
  const Owners<kWarps> owner;
  if (owner.sample >= in.batch) return;
  unsigned char* own = shared_memory() + owner.index * places.bytes;
  auto* vectors = reinterpret_cast<typename Engine::shared_t*>(own);
  auto* row = reinterpret_cast<scalar_t*>(own + places.row);
  const int num_vectors = static_cast<int>(in.vectors()), dim = static_cast<int>(in.dim);
  load_vectors<Engine>(in, owner, vectors, places.stride);
  fill_row(in, owner, row);
  __pipeline_commit();
  finish_vectors<Engine>(in, owner, vectors, places.stride);
  scalar_t* dots = row + dim;
  Engine::dots(owner, vectors, places.stride, num_vectors, dim,
               reinterpret_cast<float*>(own + places.scratch), [&](int i, int j, float value) {
                 if (j < i && i < num_vectors) {
                   dots[first_dot_of(i) + j] = static_cast<scalar_t>(value);
                 }
               });
  owner.sync();
  store_row(owner, row, output + owner.sample * in.width, static_cast<int>(in.width));
}

// A warp or a block owns a sample. It reads the gradient's row and the vectors into shared memory
// once, expands the dots' gradients to a symmetric matrix there, and writes the product of that
// matrix and the vectors, which is the vectors' gradient, once.
template <typename scalar_t, typename Engine, int kWarps>
__global__ void __launch_bounds__(kInteractionWarps* kWarp)
    backward_samples(Interaction<scalar_t> in, const scalar_t* grad, bool grad_aligned,
                     Gradients<scalar_t> gradients, Places places) {
  using shared_t = typename Engine::shared_t;
  const Owners<kWarps> owner;
  if (owner.sample >= in.batch) return;
  unsigned char* own = shared_memory() + owner.index * places.bytes;
  auto* vectors = reinterpret_cast<shared_t*>(own);
  auto* row = reinterpret_cast<scalar_t*>(own + places.row);
  auto* matrix = reinterpret_cast<shared_t*>(own + places.dots);
  const int num_vectors = static_cast<int>(in.vectors()), dim = static_cast<int>(in.dim);
  const int rows = Engine::rows(num_vectors);
  load_row(owner, grad + owner.sample * in.width, row, static_cast<int>(in.width), grad_aligned);
  __pipeline_commit();
  load_vectors<Engine>(in, owner, vectors, places.stride);
  __pipeline_commit();
  __pipeline_wait_prior(1);  // for the row, while the vectors are still in flight
  owner.sync();
  for (int j = owner.lane; j < rows; j += kWarp) {
    for (int i = owner.warp; i < rows; i += Owners<kWarps>::kThreads / kWarp) {
      const int dot = j < i ? first_dot_of(i) + j : first_dot_of(j) + i;
      const bool is_dot = i != j && i < num_vectors && j < num_vectors;
      const scalar_t read = row[is_dot ? dim + dot : 0];  // unconditionally, to avoid a branch
      const scalar_t value = is_dot ? read : static_cast<scalar_t>(0.0f);
      shared_t& to = matrix[i * places.dots_stride + j];
      if constexpr (std::is_same_v<shared_t, float>) {
        to = Engine::cast(static_cast<float>(value));
      } else {
        to = value;
      }
    }
  }
  finish_vectors<Engine>(in, owner, vectors, places.stride);
  scalar_t* dense = gradients.vector(in, owner.sample, 0);
  scalar_t* embeddings = gradients.vector(in, owner.sample, 1);
  Engine::combine(owner, matrix, places.dots_stride, vectors, places.stride, num_vectors, dim,
                  reinterpret_cast<float*>(own + places.scratch),
                  [&]<int kCount>(int i, int column, float* values) {
                    if (i >= num_vectors || column >= dim) return;
                    if (i == 0) {  // rows are padded, so this stays within the row
                      Elements<scalar_t, kCount> elements;
                      elements.load(row + column);
                      float own[kCount];
                      elements.get(own);
#pragma unroll
                      for (int k = 0; k < kCount; ++k) values[k] += own[k];
                    }
                    scalar_t* to = (i == 0 ? dense : embeddings + (i - 1) * dim) + column;
                    if (in.aligned) {
                      Elements<scalar_t, kCount> elements;
                      elements.set(values);
                      elements.store(to);
                    } else {
                      for (int k = 0; k < kCount && column + k < dim; ++k) {
                        to[k] = static_cast<scalar_t>(values[k]);
                      }
                    }
                  });
}

// For samples that do not fit into shared memory. A block owns a row of the dots of one sample, and
// a thread every kLargeThreads-th of them. The block of row 0, which has no dots, writes the dense
// vector and the zeros.
template <typename scalar_t>
__global__ void __launch_bounds__(kLargeThreads)
    forward_large(Interaction<scalar_t> in, scalar_t* output) {
  const int64_t sample = blockIdx.x / in.vectors(), i = blockIdx.x % in.vectors();
  const scalar_t* own = in.vector(sample, i);
  scalar_t* row = output + sample * in.width;
  for (int64_t j = threadIdx.x; j < i; j += kLargeThreads) {
    const scalar_t* other = in.vector(sample, j);
    float sum = 0;
    for (int64_t k = 0; k < in.dim; ++k) {
      sum += static_cast<float>(own[k]) * static_cast<float>(other[k]);
    }
    row[in.dim + first_dot_of(i) + j] = static_cast<scalar_t>(sum);
  }
  const int64_t end = in.dim + first_dot_of(in.vectors());
  for (int64_t k = threadIdx.x; i == 0 && k < in.width; k += kLargeThreads) {
    if (k < in.dim) row[k] = own[k];
    if (k >= end) row[k] = static_cast<scalar_t>(0.0f);
  }
}

// For samples that do not fit into shared memory. A block owns the gradient of a vector of one
// sample, and a thread every kLargeThreads-th column of it: it reads the gradients of the vector's
// dots, and the column of all other vectors.
template <typename scalar_t>
__global__ void __launch_bounds__(kLargeThreads)
    backward_large(Interaction<scalar_t> in, const scalar_t* grad, Gradients<scalar_t> gradients) {
  const int64_t sample = blockIdx.x / in.vectors(), i = blockIdx.x % in.vectors();
  const scalar_t* row = grad + sample * in.width;
  for (int64_t column = threadIdx.x; column < in.dim; column += kLargeThreads) {
    float sum = 0;
    for (int64_t j = 0; j < in.vectors(); ++j) {
      if (j == i) continue;
      const scalar_t dot = row[in.dim + first_dot_of(max(i, j)) + min(i, j)];
      sum += static_cast<float>(dot) * static_cast<float>(in.vector(sample, j)[column]);
    }
    if (i == 0) sum += static_cast<float>(row[column]);
    gradients.vector(in, sample, i)[column] = static_cast<scalar_t>(sum);
  }
}

template <typename scalar_t>
Interaction<scalar_t> interaction_of(const InteractionInputs& inputs) {
  const InteractionSizes& sizes = inputs.sizes;
  Interaction<scalar_t> in{inputs.dense.const_data_ptr<scalar_t>(),
                           inputs.embeddings.const_data_ptr<scalar_t>(),
                           sizes.batch,
                           sizes.tables,
                           sizes.dim,
                           sizes.width(),
                           false};
  in.aligned = sizes.dim % kElementsOf16Bytes<scalar_t> == 0 && is_aligned(in.dense) &&
               is_aligned(in.embeddings);
  return in;
}

// Calls f.operator()<Engine>() with the fastest engine of this device for these elements.
template <typename scalar_t, typename Function>
void dispatch_engine(const Device& device, const Function& f) {
  const bool wanted = !std::is_same_v<scalar_t, float> || is_on(kAllowTf32);
  if (wanted && device.capability >= TensorCores<scalar_t>::kCapability) {
    f.template operator()<TensorCores<scalar_t>>();
  } else {
    f.template operator()<PlainFloats>();
  }
}

// Calls f.operator()<kWarps>(places) with the owner that samples of this size need; returns false
// if they fit none. A warp owns a sample only if two blocks of such warps fit on a multiprocessor,
// since fewer warps could not hide the latency of memory.
template <typename Function>
bool dispatch_owners(const Device& device, int64_t vectors, const Places& one_warp,
                     const Places& block, const Function& f) {
  if (vectors <= kMostVectorsOfAWarp &&
      2 * kInteractionWarps * one_warp.bytes <= device.most_shared) {
    f.template operator()<1>(one_warp);
    return true;
  }
  if (block.bytes <= device.most_shared) {
    f.template operator()<kInteractionWarps>(block);
    return true;
  }
  return false;
}

template <typename scalar_t, typename Engine>
Places places_of(const InteractionSizes& sizes, bool backward, int warps) {
  const int64_t rows = Engine::rows(sizes.vectors()), columns = Engine::columns(sizes.dim);
  const int64_t stride = columns + Engine::kPadding;
  const int64_t matrix_stride = rows + Engine::kPadding;
  constexpr int64_t kBytes = sizeof(typename Engine::shared_t);
  return places(rows * stride * kBytes, stride, sizes.width() * sizeof(scalar_t),
                backward ? rows * matrix_stride * kBytes : 0, matrix_stride,
                warps * Engine::kScratchBytes);
}

Tensor dot_interaction(const Tensor& dense, const Tensor& embeddings) {
  const InteractionInputs inputs(dense, embeddings);
  const InteractionSizes& sizes = inputs.sizes;
  const Launcher launch("dot_interaction", inputs.dense);
  Tensor output = torch::stable::new_empty(inputs.dense, {sizes.batch, sizes.width()});
  dispatch_floating(dense.scalar_type(), [&]<typename scalar_t>() {
    const auto in = interaction_of<scalar_t>(inputs);
    auto* output_data = output.mutable_data_ptr<scalar_t>();
    dispatch_engine<scalar_t>(launch.device(), [&]<typename Engine>() {
      const bool fits = dispatch_owners(
          launch.device(), sizes.vectors(), places_of<scalar_t, Engine>(sizes, false, 1),
          places_of<scalar_t, Engine>(sizes, false, kInteractionWarps),
          [&]<int kWarps>(const Places& places) {
            constexpr int kSamples = kInteractionWarps / kWarps;
            launch(forward_samples<scalar_t, Engine, kWarps>, ceil_div(sizes.batch, kSamples),
                   dim3(kWarp, kInteractionWarps), int64_t{kSamples} * places.bytes, in,
                   output_data, places);
          });
      if (fits) return;
      launch(forward_large<scalar_t>, sizes.batch * sizes.vectors(), kLargeThreads, 0, in,
             output_data);
    });
  });
  return output;
}

std::tuple<Tensor, Tensor> dot_interaction_backward(const Tensor& grad, const Tensor& dense,
                                                    const Tensor& embeddings) {
  const InteractionInputs inputs(dense, embeddings);
  const InteractionSizes& sizes = inputs.sizes;
  const Tensor checked_grad = inputs.checked_grad(grad);
  const Launcher launch("dot_interaction_backward", inputs.dense);
  Tensor grad_dense = torch::stable::new_empty(inputs.dense, {sizes.batch, sizes.dim});
  Tensor grad_embeddings =
      torch::stable::new_empty(inputs.dense, {sizes.batch, sizes.tables, sizes.dim});
  dispatch_floating(dense.scalar_type(), [&]<typename scalar_t>() {
    const auto in = interaction_of<scalar_t>(inputs);
    const auto* grad_data = checked_grad.const_data_ptr<scalar_t>();
    const Gradients<scalar_t> gradients{grad_dense.mutable_data_ptr<scalar_t>(),
                                        grad_embeddings.mutable_data_ptr<scalar_t>()};
    dispatch_engine<scalar_t>(launch.device(), [&]<typename Engine>() {
      const bool fits = dispatch_owners(
          launch.device(), sizes.vectors(), places_of<scalar_t, Engine>(sizes, true, 1),
          places_of<scalar_t, Engine>(sizes, true, kInteractionWarps),
          [&]<int kWarps>(const Places& places) {
            constexpr int kSamples = kInteractionWarps / kWarps;
            launch(backward_samples<scalar_t, Engine, kWarps>, ceil_div(sizes.batch, kSamples),
                   dim3(kWarp, kInteractionWarps), int64_t{kSamples} * places.bytes, in, grad_data,
                   is_aligned(grad_data), gradients, places);
          });
      if (fits) return;
      launch(backward_large<scalar_t>, sizes.batch * sizes.vectors(), kLargeThreads, 0, in,
             grad_data, gradients);
    });
  });
  return {grad_dense, grad_embeddings};
}

}  // namespace
}  // namespace dlrm

DLRM_CUDA_IMPL(m) {
  m.impl("dot_interaction", TORCH_BOX(&dlrm::dot_interaction));
  m.impl("dot_interaction_backward", TORCH_BOX(&dlrm::dot_interaction_backward));
}
