// Sums of the gradients of tables with few rows, without a sort and without atomic operations.
//
// The rows of a batch are [batch, tables]. A small table's part of the batch is cut into slices. A
// block of threads adds the gradients of a slice up in shared memory, where each thread has sums of
// its own columns of every row; update_small_rows then adds up those of all slices. All sums are in
// an order that depends on the sizes alone. The pairs of the other tables are left to be sorted.
#pragma once

#include <algorithm>
#include <vector>

#include "errors.h"
#include "row_rules.h"

namespace dlrm {

constexpr int kMostTables = 256;  // of which a kernel's parameters, 4096 bytes, can tell
constexpr int kSliceThreads = 128;
// A thread's sums, in shared memory: 16 rows of 4 columns, so that up to 128 columns a table of 16
// rows is small. Blocks then have 32 KB: 2 of them find room on a GPU of 64 KB (sm_75), 3 on one of
// 100 KB (sm_86, 89, 120), 4 on an A100, 6 on an H100. These are 24 warps there, each of which has
// about kAhead gradients of 256 bytes or more on the way, 48 KB in all; to keep 4.8 TB/s busy for
// the 0.7 us that a gradient takes to come, each of 132 SMs needs 25 KB. This is reasoned and not
// measured; tables of 32 rows may be worth half of the warps.
constexpr int kSumBytes = 256;
constexpr int kAhead = 8;
// Of an SM. Where the compiler is not told, it spares registers, and gradients wait for each other.
constexpr int kSliceBlocks = 6;
constexpr int kFewestPairs = 64;  // of a group of threads in a slice
constexpr int kMostSlices = 512;  // of a table, all of which one block adds up

// The tables of a batch, and which of them are small; empty where the rows are of no known tables.
struct Tables {
  int count = 0, small = 0, others = 0;
  int most_rows = 0;  // of a small one
  int64_t begins[kMostTables + 1];
  int16_t places[kMostTables];          // among the small ones, or -1 - that among the others
  int16_t numbers[kMostTables];         // of the small ones
  int16_t sum_begins[kMostTables + 1];  // the first row of each small one among those of all

  Tables() = default;
  // Tables of up to `few` rows are small.
  Tables(const std::vector<int64_t>& sizes, int64_t few) : count(static_cast<int>(sizes.size())) {
    begins[0] = sum_begins[0] = 0;
    for (int table = 0; table < count; ++table) {
      const int64_t rows = sizes[table];
      begins[table + 1] = begins[table] + rows;
      if (rows > few) {
        places[table] = static_cast<int16_t>(-1 - others++);
        continue;
      }
      most_rows = std::max(most_rows, static_cast<int>(rows));
      numbers[small] = static_cast<int16_t>(table);
      sum_begins[small + 1] = static_cast<int16_t>(sum_begins[small] + rows);
      places[table] = static_cast<int16_t>(small++);
    }
  }

  int small_rows() const { return sum_begins[small]; }
  __device__ int rows(int place) const { return sum_begins[place + 1] - sum_begins[place]; }
};
static_assert(sizeof(Tables) + 400 <= 4096);  // 400 for whatever else a kernel takes

// How threads divide the small tables of a batch among them.
struct Slices {
  dim3 threads;       // x: of a group, y: groups of a block
  int vectors;        // of each thread, of a row
  int64_t pairs;      // of a group
  int count;          // of each table
  int64_t sum_bytes;  // of a block's sums of a row, in shared memory

  Slices(int64_t batch, int64_t dim, int vector) {
    threads = Groups(dim / vector, kSliceThreads).threads;
    vectors = static_cast<int>(ceil_div(dim, int64_t{threads.x} * vector));
    pairs = std::max<int64_t>(kFewestPairs, ceil_div(batch, int64_t{threads.y} * kMostSlices));
    count = static_cast<int>(ceil_div(batch, threads.y * pairs));
    sum_bytes = int64_t{vectors} * kSliceThreads * vector * sizeof(float);
  }

  // Of a small table, by what a thread has for sums. Touched rows are marked in 64 bits.
  static int64_t most_rows(int64_t dim, int vector) {
    static_assert(kSumBytes / sizeof(float) <= 64);
    return kSumBytes * kSliceThreads / Slices(0, dim, vector).sum_bytes;
  }
};

// A thread owns the row of one gradient, and reads it once. For a small table it writes the row's
// place in the table, once. For other tables it writes the pair's position and, unless
// `keys` is null, its key.
template <typename key_t>
__global__ void divide_rows(Tables tables, const int64_t* rows, int64_t count, int64_t total_rows,
                            key_t* keys, int32_t* positions, uint8_t* places_in_table,
                            Errors errors) {
  // From shared memory the threads of a warp read different tables at once, from parameters not.
  auto* begins = reinterpret_cast<int64_t*>(shared_memory());            // [tables + 1]
  auto* places = reinterpret_cast<int16_t*>(begins + tables.count + 1);  // [tables]
  for (int table = threadIdx.x; table <= tables.count; table += blockDim.x) {
    begins[table] = tables.begins[table];
    if (table < tables.count) places[table] = tables.places[table];
  }
  __syncthreads();
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const auto number = static_cast<uint32_t>(i), all = static_cast<uint32_t>(tables.count);
  const uint32_t table = number % all;
  const int64_t sample = number / all, row = rows[i];
  const int64_t first = begins[table], end = begins[table + 1];
  const bool bad = row < first || row >= end;
  if (row < 0 || row >= total_rows) {
    errors.report({kBadRow, i, 0, 0, row, total_rows});
  } else if (bad) {
    errors.report({kBadTableRow, i, table, 0, row, end, first});
  }
  if (const int place = places[table]; place >= 0) {
    places_in_table[sample * tables.small + place] = bad ? 0 : static_cast<uint8_t>(row - first);
  } else {
    const int64_t k = sample * tables.others - 1 - place;
    if (keys != nullptr) keys[k] = bad ? 0 : static_cast<key_t>(row);
    positions[k] = static_cast<int32_t>(i);
  }
}

// A block owns a slice of a small table's pairs, a group of threads a part of it, and a thread
// every blockDim.x-th vector of its gradients, which it reads once and adds to sums that no other
// thread touches. The groups' sums are then added up in the order of their parts, and written once,
// zeros for rows that do not occur, with the set of those that do.
template <typename grad_t, int kVector>
__global__ void __launch_bounds__(kSliceThreads, kSliceBlocks)
    sum_slices(Tables tables, Slices slices, const uint8_t* places_in_table, const grad_t* grad,
               int64_t batch, int64_t dim, const StepNumbers* numbers, float* partials,
               uint64_t* touched) {
  if (numbers->skip) return;
  const int place = blockIdx.x / slices.count, slice = blockIdx.x % slices.count;
  const int rows = tables.rows(place), vectors = slices.vectors;
  const int width = blockDim.x, groups = blockDim.y, group = threadIdx.y;
  auto* marks = reinterpret_cast<uint64_t*>(shared_memory());  // [groups]
  auto* sums = reinterpret_cast<float*>(marks + groups);       // [rows, vectors, threads, kVector]
  const auto sum_of = [&](int item, int of_group) {
    return sums + ((item * groups + of_group) * width + threadIdx.x) * kVector;
  };
  Elements<float, kVector> zeros;
  zeros.clear();
  for (int item = 0; item < rows * vectors; ++item) zeros.store(sum_of(item, group));
  const int64_t first = (int64_t{slice} * groups + group) * slices.pairs;
  const int64_t end = min(first + slices.pairs, batch);
  const int64_t stride = tables.count * dim;
  uint64_t mark = 0;
  // Without a branch between the loads, so that they are on the way together.
  const auto add = [&]<int kPairs>(int64_t begin) {
    int row[kPairs];
#pragma unroll
    for (int k = 0; k < kPairs; ++k) row[k] = places_in_table[(begin + k) * tables.small + place];
#pragma unroll
    for (int k = 0; k < kPairs; ++k) mark |= uint64_t{1} << row[k];
    const grad_t* from = grad + begin * stride + tables.numbers[place] * dim;
    for (int vector = 0; vector < vectors; ++vector) {
      const int64_t column = (int64_t{vector} * width + threadIdx.x) * kVector;
      if (column >= dim) break;
      Elements<grad_t, kVector> loaded[kPairs];
#pragma unroll
      for (int k = 0; k < kPairs; ++k) loaded[k].load(from + k * stride + column);
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        float* sum = sum_of(row[k] * vectors + vector, group);
        float values[kVector];
        loaded[k].get(values);
        add_to<kVector>(values, sum);
        Elements<float, kVector> added;
        added.set(values);
        added.store(sum);
      }
    }
  };
  int64_t begin = first;
  for (; end - begin >= kAhead; begin += kAhead) add.template operator()<kAhead>(begin);
  for (; begin < end; ++begin) add.template operator()<1>(begin);
  if (threadIdx.x == 0) marks[group] = mark;
  __syncthreads();
  for (int item = group; item < rows * vectors; item += groups) {
    const int64_t column = (int64_t{item % vectors} * width + threadIdx.x) * kVector;
    if (column >= dim) continue;
    float values[kVector] = {};
    for (int other = 0; other < groups; ++other) add_to<kVector>(values, sum_of(item, other));
    const int64_t sum_row = tables.sum_begins[place] + item / vectors;
    Elements<float, kVector> total;
    total.set(values);
    total.store(partials + (sum_row * slices.count + slice) * dim + column);
  }
  if (group == 0 && threadIdx.x == 0) {
    for (int other = 1; other < groups; ++other) mark |= marks[other];
    touched[blockIdx.x] = mark;
  }
}

// A block owns a row of a small table. It reads the slices' sums once, a group of threads a part of
// them, and its first group updates the row once, where it occurs in the batch.
template <typename Rows, int kVector>
__global__ void __launch_bounds__(kSliceThreads, kSliceBlocks)
    update_small_rows(Rows own, Tables tables, Slices slices, const float* partials,
                      const uint64_t* touched, int64_t dim, const StepNumbers* numbers) {
  const StepNumbers step = *numbers;
  if (step.skip) return;
  const int place = blockIdx.x / tables.most_rows, row = blockIdx.x % tables.most_rows;
  if (row >= tables.rows(place)) return;
  const int width = blockDim.x, groups = blockDim.y, group = threadIdx.y;
  auto* marks = reinterpret_cast<uint64_t*>(shared_memory());  // [groups]
  auto* sums = reinterpret_cast<float*>(marks + groups);       // [vectors, threads, kVector]
  const auto sum_of = [&](int vector, int of_group) {
    return sums + ((vector * groups + of_group) * width + threadIdx.x) * kVector;
  };
  touched += int64_t{place} * slices.count;
  partials += int64_t{tables.sum_begins[place] + row} * slices.count * dim;
  const int part = (slices.count + groups - 1) / groups;
  const int begin = group * part, end = min(begin + part, slices.count);
  uint64_t mark = 0;
  for (int slice = begin; slice < end; ++slice) mark |= touched[slice];
  if (threadIdx.x == 0) marks[group] = mark;
  for (int vector = 0; vector < slices.vectors; ++vector) {
    const int64_t column = (int64_t{vector} * width + threadIdx.x) * kVector;
    if (column >= dim) break;
    float values[kVector] = {};
    const float* from = partials + column;
    const auto add = [&]<int kSlices>(int slice) {
      Elements<float, kVector> loaded[kSlices];
#pragma unroll
      for (int k = 0; k < kSlices; ++k) loaded[k].load(from + (slice + k) * dim);
#pragma unroll
      for (int k = 0; k < kSlices; ++k) {
        float added[kVector];
        loaded[k].get(added);
#pragma unroll
        for (int j = 0; j < kVector; ++j) values[j] += added[j];
      }
    };
    int slice = begin;
    for (; end - slice >= kAhead; slice += kAhead) add.template operator()<kAhead>(slice);
    for (; slice < end; ++slice) add.template operator()<1>(slice);
    Elements<float, kVector> sum;
    sum.set(values);
    sum.store(sum_of(vector, group));
  }
  __syncthreads();
  if (group > 0) return;
  for (int other = 1; other < groups; ++other) mark |= marks[other];
  if ((mark >> row & 1) == 0) return;
  update_row<kVector>(own, tables.begins[tables.numbers[place]] + row, dim, step.rate, width,
                      threadIdx.x, [&](int64_t column, float* values) {
                        const int vector = static_cast<int>(column) / (width * kVector);
#pragma unroll
                        for (int k = 0; k < kVector; ++k) values[k] = 0;
                        for (int other = 0; other < groups; ++other)
                          add_to<kVector>(values, sum_of(vector, other));
#pragma unroll
                        for (int k = 0; k < kVector; ++k) values[k] *= step.inverse_scale;
                      });
}

}  // namespace dlrm
