// Kernels of joint_embedding_bag for one instruction set; see for_each_isa.h.

// Bytes of rows asked for ahead of the one being added: enough to cover memory's latency.
constexpr int64_t kBagAheadBytes = 8192;

// The next id whose row is to be asked for, and the bag that it lies in.
template <typename weight_t, typename id_t>
struct RowsAhead {
  const weight_t* weight;
  const id_t* ids;
  const int64_t* bag_offsets;
  const int64_t* table_offsets;
  int64_t tables;
  int64_t dim;
  int64_t bag;
  int64_t table;
  int64_t next;
  int64_t last;
};

// Asks for the rows of the ids before `position` that were not asked for yet.
template <typename weight_t, typename id_t>
DLRM_INLINE void ask_for_rows(RowsAhead<weight_t, id_t>& ahead, int64_t position) {
  const int64_t row_bytes = ahead.dim * sizeof(weight_t);
  for (position = std::min(position, ahead.last); ahead.next < position; ++ahead.next) {
    while (ahead.bag_offsets[ahead.bag + 1] <= ahead.next) {
      ++ahead.bag;
      if (++ahead.table == ahead.tables) ahead.table = 0;
    }
    const auto row = static_cast<uint64_t>(ahead.table_offsets[ahead.table]) +
                     static_cast<uint64_t>(int64_t{ahead.ids[ahead.next]});  // or bad
    prefetch_bytes(reinterpret_cast<uintptr_t>(ahead.weight) + row * row_bytes, row_bytes);
  }
}

// One bag: ids [begin, end) of a table.
template <typename weight_t, typename id_t>
struct Bag {
  const weight_t* table;
  const id_t* ids;
  const float* sample_weights;  // or null: all are 1
  int64_t begin;
  int64_t end;
  float scale;  // of the sum
};

// Sums kVectors vectors of columns, or the `columns` < kLanes last ones, in registers.
template <int64_t kVectors, typename weight_t, typename output_t, typename id_t>
DLRM_INLINE void pool_columns(const Bag<weight_t, id_t>& bag, RowsAhead<weight_t, id_t>& ahead,
                              int64_t rows_ahead, int64_t first_column, int64_t columns,
                              output_t* output) {
  Vec sums[kVectors];
  for (int64_t v = 0; v < kVectors; ++v) sums[v] = zero();
  for (int64_t i = bag.begin; i < bag.end; ++i) {
    ask_for_rows(ahead, i + rows_ahead);
    const weight_t* row = bag.table + int64_t{bag.ids[i]} * ahead.dim + first_column;
    const Vec factor = broadcast(bag.sample_weights ? bag.sample_weights[i] : 1.0f);
    for (int64_t v = 0; v < kVectors; ++v) {
      sums[v] += factor * (columns ? load_first(row, columns) : load(row + v * kLanes));
    }
  }
  const Vec scale = broadcast(bag.scale);
  output += first_column;
  if (columns) return store_first(output, sums[0] * scale, columns);
  for (int64_t v = 0; v < kVectors; ++v) store(output + v * kLanes, sums[v] * scale);
}

// Pools bags [begin, end) of the flattened [batch, tables]: reads each row once, a stripe of
// columns after the other, and writes each output row once. Returns the first position whose id is
// outside its table, where it stops, or -1.
template <typename weight_t, typename output_t, typename id_t>
int64_t pool_bags(const weight_t* weight, const id_t* ids, const float* sample_weights,
                  const int64_t* bag_offsets, const int64_t* table_offsets, int64_t tables,
                  int64_t dim, bool mean, output_t* output, int64_t begin, int64_t end) {
  constexpr int64_t kStripe = 8;  // vectors of sums in registers
  const int64_t rows_ahead = std::clamp<int64_t>(kBagAheadBytes / (dim * sizeof(weight_t)), 4, 64);
  int64_t table = begin % tables;
  RowsAhead<weight_t, id_t> ahead{weight, ids,   bag_offsets, table_offsets,      tables,
                                  dim,    begin, table,       bag_offsets[begin], bag_offsets[end]};
  for (int64_t index = begin; index < end; ++index) {
    const int64_t first = bag_offsets[index], last = bag_offsets[index + 1];
    const auto table_size = static_cast<uint64_t>(table_offsets[table + 1] - table_offsets[table]);
    for (int64_t i = first; i < last; ++i) {
      if (static_cast<uint64_t>(int64_t{ids[i]}) >= table_size) return i;
    }
    const float scale = mean && last > first ? 1.0f / static_cast<float>(last - first) : 1.0f;
    const Bag<weight_t, id_t> bag{
        weight + table_offsets[table] * dim, ids, sample_weights, first, last, scale};
    output_t* row = output + index * dim;
    int64_t column = 0;
    for (; column + kStripe * kLanes <= dim; column += kStripe * kLanes) {
      pool_columns<kStripe>(bag, ahead, rows_ahead, column, 0, row);
    }
    for (; column + 2 * kLanes <= dim; column += 2 * kLanes) {
      pool_columns<2>(bag, ahead, rows_ahead, column, 0, row);
    }
    for (; column + kLanes <= dim; column += kLanes) {
      pool_columns<1>(bag, ahead, rows_ahead, column, 0, row);
    }
    if (column < dim) pool_columns<1>(bag, ahead, rows_ahead, column, dim - column, row);
    if (++table == tables) table = 0;
  }
  return -1;
}

// Writes the gradient of each looked-up row: that of its bag's output, scaled. A task owns bags
// [begin, end); each gradient is read once and each value written once.
template <typename scalar_t, bool kStream>
void spread_bags(const scalar_t* grad, const float* sample_weights, const int64_t* bag_offsets,
                 int64_t dim, bool mean, scalar_t* values, int64_t begin, int64_t end) {
  for (int64_t index = begin; index < end; ++index) {
    const int64_t first = bag_offsets[index], last = bag_offsets[index + 1];
    const scalar_t* from = grad + index * dim;
    const float scale = mean ? 1.0f / static_cast<float>(last - first) : 1.0f;
    for (int64_t i = first; i < last; ++i) {
      scalar_t* to = values + i * dim;
      if (!mean && !sample_weights) {
        copy_elements<kStream>(from, to, dim);
        continue;
      }
      const Vec factor = broadcast(sample_weights ? scale * sample_weights[i] : scale);
      int64_t column = 0;
      for (; column + kLanes <= dim; column += kLanes) {
        store<kStream>(to + column, factor * load(from + column));
      }
      if (column < dim) {
        store_first(to + column, factor * load_first(from + column, dim - column), dim - column);
      }
    }
  }
  if constexpr (kStream) finish_streaming();
}

// Writes the gradient of each sample weight: its row times the gradient of its bag's output. A task
// owns bags [begin, end) and reads each row once. Returns the first position whose row is outside
// the weight, where it stops, or -1.
template <typename weight_t, typename grad_t>
int64_t dot_bags(const weight_t* weight, const grad_t* grad, const int64_t* rows,
                 const int64_t* bag_offsets, int64_t total_rows, int64_t dim, bool mean,
                 float* output, int64_t begin, int64_t end) {
  const int64_t row_bytes = dim * sizeof(weight_t);
  const int64_t rows_ahead = std::clamp<int64_t>(kBagAheadBytes / row_bytes, 4, 64);
  for (int64_t index = begin; index < end; ++index) {
    const int64_t first = bag_offsets[index], last = bag_offsets[index + 1];
    const grad_t* right = grad + index * dim;
    for (int64_t i = first; i < last; ++i) {
      if (i + rows_ahead < bag_offsets[end]) {
        const auto row = static_cast<uint64_t>(rows[i + rows_ahead]);
        prefetch_bytes(reinterpret_cast<uintptr_t>(weight) + row * row_bytes, row_bytes);
      }
      if (static_cast<uint64_t>(rows[i]) >= static_cast<uint64_t>(total_rows)) return i;
      const weight_t* left = weight + rows[i] * dim;
      Vec sum = zero();
      int64_t column = 0;
      for (; column + kLanes <= dim; column += kLanes) {
        sum += load(left + column) * load(right + column);
      }
      if (column < dim) {
        sum += load_first(left + column, dim - column) * load_first(right + column, dim - column);
      }
      const float dot = sum_lanes(sum);
      output[i] = mean ? dot / static_cast<float>(last - first) : dot;
    }
  }
  return -1;
}
