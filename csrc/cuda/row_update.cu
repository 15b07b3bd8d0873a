#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "../row_update.h"
#include "errors.h"
#include "row_rules.h"
#include "small_tables.h"

namespace dlrm {
namespace {

constexpr int kUpdateThreads = 256;
constexpr int kChunk = 32;     // pairs that one group of threads processes
constexpr int kStarts = 64;    // chunks whose unfinished runs one block completes
constexpr int kShortRun = 16;  // a run of up to this many chunks is completed by one warp
constexpr int kFinishWarps = 8;
constexpr int kFewestThreads = 4;  // of a group; fewer would exceed the shared memory of a block

// A scalar on the device whose dtype the kernel looks up, or no value.
struct DeviceScalar {
  const void* data = nullptr;
  ScalarType dtype = ScalarType::Float;

  DeviceScalar() = default;
  DeviceScalar(const char* name, const char* what, const std::optional<Tensor>& tensor,
               const Tensor& weight) {
    if (!tensor) return;
    DLRM_CHECK(tensor->numel() == 1 && tensor->device() == weight.device(), name, ": expected ",
               what, " to be one value on the weight's device, got ", shape_of(*tensor));
    data = tensor->const_data_ptr();
    dtype = tensor->scalar_type();
    DLRM_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double ||
                   dtype == ScalarType::Long || dtype == ScalarType::Bool,
               name, ": expected ", what, " to be Float, Double, Long or Bool, got ",
               dtype_of(*tensor));
  }

  __device__ double value(double otherwise) const {
    if (data == nullptr) return otherwise;
    switch (dtype) {
      case ScalarType::Double:
        return *static_cast<const double*>(data);
      case ScalarType::Long:
        return static_cast<double>(*static_cast<const int64_t*>(data));
      case ScalarType::Bool:
        return *static_cast<const bool*>(data);
      default:
        return *static_cast<const float*>(data);
    }
  }
};

struct Scalars {
  DeviceScalar lr, grad_scale, found_inf, step;
  double beta1 = 0, beta2 = 0;  // of Adam, which also has a step number
};

// One thread reads each scalar once and writes each number of the step once.
__global__ void prepare_step(Scalars scalars, Errors errors, StepNumbers* numbers) {
  double rate = scalars.lr.value(0);
  if (scalars.step.data != nullptr) {
    const double step = scalars.step.value(1);
    if (step < 1) errors.report({kBadStep, 0, 0, 0, static_cast<int64_t>(step), 0});
    rate *= sqrt(1 - pow(scalars.beta2, step)) / (1 - pow(scalars.beta1, step));
  }
  numbers->rate = static_cast<float>(rate);
  numbers->inverse_scale = static_cast<float>(1 / scalars.grad_scale.value(1));
  const bool reported = errors.seal();
  numbers->skip = reported || scalars.found_inf.value(0) != 0;
}

// A thread owns the row number of one gradient. It reads it once and, unless `keys` is null, writes
// the key and the position of the pair to be sorted once.
template <typename key_t>
__global__ void __launch_bounds__(kUpdateThreads)
    check_rows(const int64_t* rows, int64_t count, int64_t total_rows, key_t* keys,
               int32_t* positions, Errors errors) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int64_t row = rows[i];
  const bool bad = row < 0 || row >= total_rows;
  if (bad) errors.report({kBadRow, i, 0, 0, row, total_rows});
  if (keys == nullptr) return;
  keys[i] = bad ? 0 : static_cast<key_t>(row);
  positions[i] = static_cast<int32_t>(i);
}

// Pairs of a row and the position of a gradient, sorted by row, then by position.
struct Sorted {
  Integers rows;  // unsigned
  const int32_t* positions;
  int64_t count;

  __device__ int64_t row(int64_t i) const {
    return rows.bytes == 4 ? static_cast<const uint32_t*>(rows.data)[i]
                           : static_cast<const int64_t*>(rows.data)[i];
  }
  // Returns the end of the run (equal rows) that includes the pair before `begin`.
  __device__ int64_t end_of_run(int64_t begin) const {
    const int64_t own = row(begin);
    int64_t inside = begin, end = count;
    while (end - inside > 1) {
      const int64_t middle = inside + (end - inside) / 2;
      if (row(middle) == own) {
        inside = middle;
      } else {
        end = middle;
      }
    }
    return end;
  }
};

// For each chunk of pairs, partial sums of the runs that cross its ends: of the run that began in
// an earlier chunk (`head`) and of the run that continues in the next one (`tail`), `dim` floats
// each.
struct Partials {
  float* data;
  int64_t dim;

  __device__ float* head(int64_t chunk) const { return data + 2 * chunk * dim; }
  __device__ float* tail(int64_t chunk) const { return data + (2 * chunk + 1) * dim; }
};

// A group of threads owns a chunk of pairs; each thread of it owns every blockDim.x-th vector of
// the rows. The group reads each gradient once. Rows whose pairs all lie within the chunk are read
// and written once; for other rows it writes partial sums, which finish_runs completes.
template <typename grad_t, typename Rows, int kVector>
__global__ void __launch_bounds__(kUpdateThreads)
    update_chunks(Rows own, Sorted sorted, const grad_t* grad, int64_t dim,
                  const StepNumbers* numbers, Partials partials) {
  const StepNumbers step = *numbers;
  if (step.skip) return;
  const int most = blockDim.y * kChunk;
  const int64_t block_begin = int64_t{blockIdx.x} * most;
  const int pairs = static_cast<int>(min(int64_t{most}, sorted.count - block_begin));
  auto* rows = reinterpret_cast<int64_t*>(shared_memory()) + 1;  // with one more on either side
  auto* positions = reinterpret_cast<int32_t*>(rows + most + 1);
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < pairs; i += blockDim.x * blockDim.y) {
    rows[i] = sorted.row(block_begin + i);
    positions[i] = sorted.positions[block_begin + i];
  }
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    rows[-1] = block_begin > 0 ? sorted.row(block_begin - 1) : -1;
    rows[pairs] = block_begin + pairs < sorted.count ? sorted.row(block_begin + pairs) : -1;
  }
  __syncthreads();
  const int begin = threadIdx.y * kChunk, end = min(begin + kChunk, pairs);
  const int64_t chunk = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  for (int i = begin, next; i < end; i = next) {
    const int64_t row = rows[i];
    for (next = i + 1; next < end && rows[next] == row;) ++next;
    const auto sum = [&](int64_t column, float* values) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) values[k] = 0;
      for (int k = i; k < next; ++k) add_to<kVector>(values, grad + positions[k] * dim + column);
    };
    const bool began_before = i == begin && rows[i - 1] == row;
    const bool goes_on = next == end && rows[next] == row;
    if (began_before || goes_on) {
      float* partial = began_before ? partials.head(chunk) : partials.tail(chunk);
      for (int64_t column = threadIdx.x * kVector; column < dim; column += blockDim.x * kVector) {
        float values[kVector];
        sum(column, values);
        Elements<float, kVector> elements;
        elements.set(values);
        elements.store(partial + column);
      }
    } else {
      update_row<kVector>(own, row, dim, step.rate, blockDim.x, threadIdx.x,
                          [&](int64_t column, float* values) {
                            sum(column, values);
#pragma unroll
                            for (int k = 0; k < kVector; ++k) values[k] *= step.inverse_scale;
                          });
    }
  }
}

// A block owns the runs that begin in kStarts chunks and continue in later ones. One warp sums a
// run of up to kShortRun chunks; longer runs are divided among all warps. Partial sums are read
// once, rows are read and written once, and all sums are in the order of the pairs.
template <typename Rows, int kVector>
__global__ void __launch_bounds__(kFinishWarps* kWarp)
    finish_runs(Rows own, Sorted sorted, const StepNumbers* numbers, Partials partials) {
  const StepNumbers step = *numbers;
  if (step.skip) return;
  const int64_t dim = partials.dim;
  const int warp = threadIdx.y, lane = threadIdx.x;
  auto* sums = reinterpret_cast<float*>(shared_memory());  // [warps, warp's vectors]
  auto* is_long = reinterpret_cast<int*>(sums + kFinishWarps * kWarp * kVector);  // [kStarts]
  const int64_t first = int64_t{blockIdx.x} * kStarts;
  const auto update = [&](int64_t row, const auto& total) {
    update_row<kVector>(own, row, dim, step.rate, kWarp, lane, [&](int64_t column, float* values) {
      total(column, values);
#pragma unroll
      for (int k = 0; k < kVector; ++k) values[k] *= step.inverse_scale;
    });
  };
  for (int start = warp; start < kStarts; start += kFinishWarps) {
    if (lane == 0) is_long[start] = 0;
    const int64_t chunk = first + start, behind = (chunk + 1) * kChunk;
    if (behind >= sorted.count) continue;
    const int64_t row = sorted.row(behind - 1);
    const bool began_before = chunk > 0 && sorted.row(chunk * kChunk - 1) == row;
    if (sorted.row(behind) != row || began_before) continue;
    const int64_t last_chunk = (sorted.end_of_run(behind) - 1) / kChunk;
    if (last_chunk - chunk >= kShortRun) {
      if (lane == 0) is_long[start] = 1;
      continue;
    }
    update(row, [&](int64_t column, float* values) {
      Elements<float, kVector> elements;
      elements.load(partials.tail(chunk) + column);
      elements.get(values);
      for (int64_t c = chunk + 1; c <= last_chunk; ++c) {
        add_to<kVector>(values, partials.head(c) + column);
      }
    });
  }
  __syncthreads();
  for (int start = 0; start < kStarts; ++start) {
    if (is_long[start] == 0) continue;
    const int64_t chunk = first + start, behind = (chunk + 1) * kChunk;
    const int64_t heads = (sorted.end_of_run(behind) - 1) / kChunk - chunk;
    const int64_t part = (heads + kFinishWarps - 1) / kFinishWarps;
    const int64_t begin = chunk + 1 + warp * part, end = min(begin + part, chunk + 1 + heads);
    for (int64_t column = lane * kVector; column - lane * kVector < dim;
         column += kWarp * kVector) {
      float values[kVector] = {};
      if (column < dim) {
#pragma unroll 4
        for (int64_t c = begin; c < end; ++c) {
          add_to<kVector>(values, partials.head(c) + column);
        }
      }
      for (int k = 0; k < kVector; ++k) sums[(warp * kWarp + lane) * kVector + k] = values[k];
      __syncthreads();
      if (warp == 0 && column < dim) {
        float* total = partials.tail(chunk) + column;
        for (int w = 0; w < kFinishWarps; ++w) {
          for (int k = 0; k < kVector; ++k) total[k] += sums[(w * kWarp + lane) * kVector + k];
        }
      }
      __syncthreads();
    }
    if (warp == 0) {
      update(sorted.row(behind), [&](int64_t column, float* values) {
        for (int k = 0; k < kVector; ++k) values[k] = partials.tail(chunk)[column + k];
      });
    }
  }
}

// With this many columns or more, plain SGD also sums in order: in most settings sorting costs less
// than atomic additions cost over plain writes (benchmarks/RESULTS.md, One GPU).
constexpr int64_t kOrderedColumns = 128;

// Since this compute capability, one atomic operation adds four floats. On earlier devices adjacent
// threads add adjacent floats; otherwise a warp would access each sector of memory four times.
constexpr int kVectorAtomics = 90;

// Subtracts kVector elements atomically.
template <int kVector>
__device__ void subtract(float* from, const float* values) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) atomicAdd(from + k, -values[k]);
}

#if defined(DLRM_EMULATE_CUDA) || (__CUDA_ARCH__ >= 900 && CUDART_VERSION >= 12010)
template <>
__device__ void subtract<4>(float* from, const float* values) {
  atomicAdd(reinterpret_cast<float4*>(from),
            float4{-values[0], -values[1], -values[2], -values[3]});
}
#endif

// A group of threads owns a gradient, reads it once and adds it to its row atomically, so the order
// of the additions to a row is not defined. Without `positions` all gradients are added.
template <typename grad_t, int kVector>
__global__ void __launch_bounds__(kUpdateThreads)
    add_gradients(float* weight, const int64_t* rows, const int32_t* positions, int64_t count,
                  const grad_t* grad, int64_t dim, const StepNumbers* numbers) {
  const StepNumbers step = *numbers;
  const int64_t pair = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (step.skip || pair >= count) return;
  const int64_t i = positions == nullptr ? pair : positions[pair];
  for (int64_t column = threadIdx.x * kVector; column < dim; column += blockDim.x * kVector) {
    float values[kVector] = {};
    add_to<kVector>(values, grad + i * dim + column);
#pragma unroll
    for (int k = 0; k < kVector; ++k) values[k] = step.rate * (values[k] * step.inverse_scale);
    subtract<kVector>(weight + rows[i] * dim + column, values);
  }
}

// The part of a row update that is common to all rules.
struct Update {
  const RowUpdateInputs& inputs;
  Launcher launch;
  Errors errors;
  Tensor numbers;

  explicit Update(const RowUpdateInputs& inputs_)
      : inputs(inputs_),
        launch(inputs.name, inputs.rows),
        errors(launch, kRowUpdate),
        numbers(torch::stable::new_empty(inputs.rows, {sizeof(StepNumbers)}, ScalarType::Byte)) {}

  // For plain SGD on float32, which does not need the complete sum of a row.
  bool is_faster_in_order() const {
    return inputs.dim >= kOrderedColumns && inputs.count <= kMostPairs;
  }

  // Applies the rule to the sums of rows; results are bitwise reproducible.
  template <typename Rows>
  void in_order(const Rows& own, const Scalars& scalars) {
    DLRM_CHECK(inputs.count <= kMostPairs, inputs.name, ": ", inputs.count,
               " gradients are more than ", kMostPairs, ": split the batch");
    dispatch(own, [&]<typename grad_t, int kVector>() {
      const Tables tables = tables_of(kVector);
      const int bits = std::max<int>(1, std::bit_width(static_cast<uint64_t>(inputs.total_rows)));
      const int64_t count = other_pairs(tables);
      Tensor keys = empty(count, bits <= 32 ? ScalarType::Int : ScalarType::Long);
      Tensor positions = empty(count, ScalarType::Int);
      Tensor places = empty(inputs.count - count, ScalarType::Byte);
      auto* positions_data = positions.mutable_data_ptr<int32_t>();
      if (bits <= 32) {
        auto* data = static_cast<uint32_t*>(keys.mutable_data_ptr());
        prepare(scalars, tables, data, positions_data, places);
      } else {
        auto* data = static_cast<uint64_t*>(keys.mutable_data_ptr());
        prepare(scalars, tables, data, positions_data, places);
      }
      update_small<grad_t, kVector>(own, tables, places);
      if (count == 0) return;
      const SortedPairs pairs = sort_pairs(launch, keys, positions, bits);
      update_sorted<grad_t, kVector>(
          own, {Integers(pairs.keys), pairs.values.const_data_ptr<int32_t>(), count});
    });
  }

  // Subtracts the gradients: those of small tables in order, others atomically, in any order.
  template <typename Rows>
  void by_atomics(const Rows& own, const Scalars& scalars) {
    dispatch(own, [&]<typename grad_t, int kVector>() {
      const Tables tables = tables_of(kVector);
      const int64_t count = other_pairs(tables);
      Tensor positions = empty(tables.count > 0 ? count : 0, ScalarType::Int);
      Tensor places = empty(inputs.count - count, ScalarType::Byte);
      int32_t* data = tables.count > 0 ? positions.mutable_data_ptr<int32_t>() : nullptr;
      prepare<uint32_t>(scalars, tables, nullptr, data, places);
      update_small<grad_t, kVector>(own, tables, places);
      if (launch.device().capability >= kVectorAtomics) {
        add<grad_t, kVector>(own.weight, data, count);
      } else {
        add<grad_t, 1>(own.weight, data, count);
      }
    });
  }

 private:
  static constexpr int64_t kMostPairs = std::numeric_limits<int32_t>::max();

  StepNumbers* step() { return static_cast<StepNumbers*>(numbers.mutable_data_ptr()); }

  template <typename grad_t, int kVector>
  void add(Floats weight, const int32_t* positions, int64_t count) {
    const Groups groups(inputs.dim / kVector, kUpdateThreads);
    launch(add_gradients<grad_t, kVector>, ceil_div(count, groups.threads.y), groups.threads, 0,
           weight.data, inputs.rows.const_data_ptr<int64_t>(), positions, count,
           inputs.grad.const_data_ptr<grad_t>(), inputs.dim, step());
  }

  // Calls f with the type of the gradients and the number of elements read at once.
  template <typename Rows, typename Function>
  void dispatch(const Rows& own, const Function& f) const {
    dispatch_floating(inputs.grad.scalar_type(), [&]<typename grad_t>() {
      if (inputs.dim % 4 == 0 && own.aligned() &&
          is_aligned(inputs.grad.const_data_ptr<grad_t>(), 4 * sizeof(grad_t))) {
        f.template operator()<grad_t, 4>();
      } else {
        f.template operator()<grad_t, 1>();
      }
    });
  }

  // Small tables are ignored if there are more than a kernel's arguments can describe, or more
  // pairs than positions can number.
  Tables tables_of(int vector) const {
    if (inputs.table_sizes.size() > kMostTables || inputs.count > kMostPairs) return {};
    return {inputs.table_sizes, Slices::most_rows(inputs.dim, vector)};
  }

  int64_t batch(const Tables& tables) const { return inputs.count / tables.count; }

  // The number of pairs that do not belong to small tables.
  int64_t other_pairs(const Tables& tables) const {
    return tables.count > 0 ? batch(tables) * tables.others : inputs.count;
  }

  Tensor empty(int64_t count, ScalarType dtype) const {
    return torch::stable::new_empty(inputs.rows, {count}, dtype);
  }

  // Reports bad rows, divides the pairs between the two ways, and writes the numbers of the step.
  template <typename key_t>
  void prepare(const Scalars& scalars, const Tables& tables, key_t* keys, int32_t* positions,
               Tensor& places) {
    const int64_t* rows = inputs.rows.const_data_ptr<int64_t>();
    const int64_t blocks = ceil_div(inputs.count, kUpdateThreads);
    if (tables.count > 0) {
      launch(divide_rows<key_t>, blocks, kUpdateThreads,
             (tables.count + 1) * (sizeof(int64_t) + sizeof(int16_t)), tables, rows, inputs.count,
             inputs.total_rows, keys, positions, places.mutable_data_ptr<uint8_t>(), errors);
    } else {
      launch(check_rows<key_t>, blocks, kUpdateThreads, 0, rows, inputs.count, inputs.total_rows,
             keys, positions, errors);
    }
    launch(prepare_step, 1, 1, 0, scalars, errors, step());
  }

  template <typename grad_t, int kVector, typename Rows>
  void update_small(const Rows& own, const Tables& tables, const Tensor& places) {
    if (tables.small == 0 || inputs.count == 0) return;
    const Slices slices(batch(tables), inputs.dim, kVector);
    Tensor touched = empty(int64_t{tables.small} * slices.count, ScalarType::Long);
    Tensor sums =
        empty(int64_t{tables.small_rows()} * slices.count * inputs.dim, ScalarType::Float);
    auto* touched_data = static_cast<uint64_t*>(touched.mutable_data_ptr());
    float* sums_data = sums.mutable_data_ptr<float>();
    const int64_t marks = slices.threads.y * sizeof(uint64_t);
    launch(sum_slices<grad_t, kVector>, touched.numel(), slices.threads,
           marks + tables.most_rows * slices.sum_bytes, tables, slices,
           places.const_data_ptr<uint8_t>(), inputs.grad.const_data_ptr<grad_t>(), batch(tables),
           inputs.dim, step(), sums_data, touched_data);
    launch(update_small_rows<Rows, kVector>, int64_t{tables.small} * tables.most_rows,
           slices.threads, marks + slices.sum_bytes, own, tables, slices, sums_data, touched_data,
           inputs.dim, step());
  }

  template <typename grad_t, int kVector, typename Rows>
  void update_sorted(const Rows& own, const Sorted& sorted) {
    const int64_t dim = inputs.dim;
    Groups groups(dim / kVector, kUpdateThreads);
    if (groups.threads.x < kFewestThreads) {
      groups.threads = dim3(kFewestThreads, kUpdateThreads / kFewestThreads);
    }
    const int64_t chunks = ceil_div(sorted.count, kChunk);
    Tensor sums = empty(2 * chunks * dim, ScalarType::Float);
    const Partials partials{sums.mutable_data_ptr<float>(), dim};
    const int64_t pairs = int64_t{groups.threads.y} * kChunk;
    launch(update_chunks<grad_t, Rows, kVector>, ceil_div(chunks, groups.threads.y), groups.threads,
           (pairs + 2) * sizeof(int64_t) + pairs * sizeof(int32_t), own, sorted,
           inputs.grad.const_data_ptr<grad_t>(), dim, step(), partials);
    launch(finish_runs<Rows, kVector>, ceil_div(chunks, kStarts), dim3(kWarp, kFinishWarps),
           kFinishWarps * kWarp * kVector * sizeof(float) + kStarts * sizeof(int), own, sorted,
           step(), partials);
  }
};

void row_update(int64_t number, Tensor weight, std::vector<Tensor> states, const Tensor& rows,
                const Tensor& grad, const Tensor& lr, std::optional<Tensor> step,
                std::vector<double> constants, double l2, std::optional<Tensor> low,
                TableSizes table_sizes, std::optional<Tensor> grad_scale,
                std::optional<Tensor> found_inf) {
  const RowUpdateInputs inputs(weight, low, rows, grad, table_sizes);
  const char* name = inputs.name;
  // It needs the number of steps that each row has missed, which the host counts.
  DLRM_CHECK(l2 == 0, name, ": expected l2 0 on a GPU, got ", l2);
  Scalars scalars{{name, "lr", lr, weight},
                  {name, "grad_scale", grad_scale, weight},
                  {name, "found_inf", found_inf, weight}};
  const std::vector<double> exact = constants;
  for (double& constant : constants) constant = static_cast<float>(constant);
  dispatch_rule(name, number, constants, [&]<typename Rule>(const Rule& rule) {
    inputs.check_states(rule, states);
    if constexpr (Rule::kCountsSteps) {
      DLRM_CHECK(step, name, ": expected step, the number of this update");
      scalars.step = DeviceScalar(name, "step", step, weight);
      scalars.beta1 = exact[0];
      scalars.beta2 = exact[1];
    }
    Floats data[kMostStates] = {};
    for (size_t i = 0; i < states.size(); ++i) data[i] = {states[i].mutable_data_ptr<float>()};
    Update update(inputs);
    if (low) {
      const SplitFloats halves{static_cast<uint16_t*>(weight.mutable_data_ptr()),
                               low->mutable_data_ptr<int16_t>()};
      return update.in_order(Rows<Rule, SplitFloats>{rule, halves, {data[0], data[1]}}, scalars);
    }
    const Rows<Rule, Floats> own{rule, {weight.mutable_data_ptr<float>()}, {data[0], data[1]}};
    if constexpr (std::is_same_v<Rule, Sgd>) {
      if (!is_on(kDeterministic) && !update.is_faster_in_order()) {
        return update.by_atomics(own, scalars);
      }
    }
    update.in_order(own, scalars);
  });
}

}  // namespace
}  // namespace dlrm

DLRM_CUDA_IMPL(m) { m.impl("row_update_", TORCH_BOX(&dlrm::row_update)); }
