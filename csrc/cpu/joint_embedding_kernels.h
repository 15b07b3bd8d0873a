// Kernels of look-ups for one instruction set; see for_each_isa.h.

// Bytes of rows asked for ahead of the one being copied: enough to cover memory's latency.
constexpr int64_t kGatherAheadBytes = 8192;

// Looks up ids [begin, end) of the flattened [batch, tables]: reads each id once (and once more to
// prefetch its row), each row once, writes each row once. Returns the first position whose id is
// outside its table, where it stops, or -1.
template <typename weight_t, typename output_t, typename id_t, bool kStream>
int64_t gather_rows(const weight_t* weight, const id_t* ids, TableRanges ranges, int64_t tables,
                    int64_t dim, output_t* output, int64_t begin, int64_t end) {
  const int64_t row_bytes = dim * sizeof(weight_t);
  const int64_t ahead = std::clamp<int64_t>(kGatherAheadBytes / row_bytes, 4, 64);
  int64_t next_table = begin % tables;
  int64_t next = begin;
  int64_t table = begin % tables;
  for (int64_t position = begin; position < end; ++position) {
    for (; next < std::min(position + ahead, end); ++next) {
      const uint64_t row = static_cast<uint64_t>(ranges.begins[next_table]) + ids[next];  // or bad
      prefetch_bytes(reinterpret_cast<uintptr_t>(weight) + row * row_bytes, row_bytes);
      if (++next_table == tables) next_table = 0;
    }
    const int64_t offset = ranges.begins[table];
    const int64_t id = ids[position];
    if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(ranges.ends[table] - offset)) {
      return position;
    }
    copy_elements<kStream>(weight + (offset + id) * dim, output + position * dim, dim);
    if (++table == tables) table = 0;
  }
  if constexpr (kStream) finish_streaming();
  return -1;
}

// Bytes of rows asked for ahead of the one being added: enough to cover memory's latency.
constexpr int64_t kBagAheadBytes = 4096;

// Writes the weight's row of each id of bags [begin, end). Returns the first position whose id is
// outside its table, or -1.
template <typename id_t>
int64_t find_rows(const id_t* ids, const int64_t* bag_offsets, TableRanges ranges, int64_t tables,
                  int64_t* rows, int64_t begin, int64_t end) {
  int64_t table = begin % tables;
  for (int64_t bag = begin; bag < end; ++bag) {
    const int64_t offset = ranges.begins[table];
    const auto size = static_cast<uint64_t>(ranges.ends[table] - offset);
    for (int64_t i = bag_offsets[bag]; i < bag_offsets[bag + 1]; ++i) {
      const int64_t id = ids[i];
      if (static_cast<uint64_t>(id) >= size) return i;
      *rows++ = offset + id;
    }
    if (++table == tables) table = 0;
  }
  return -1;
}

// One bag: rows [0, count), and those of the bags after it up to `known`.
template <typename weight_t>
struct Bag {
  const weight_t* weight;
  const int64_t* rows;
  const float* sample_weights;  // or null: all are 1
  int64_t count;
  int64_t known;
  int64_t dim;
  float scale;  // of the sum
};

// Sums kVectors vectors of columns, or the `columns` < kLanes last ones, in registers. The first
// stripe of columns asks for the rows ahead.
template <int64_t kVectors, typename weight_t, typename output_t>
DLRM_INLINE void pool_columns(const Bag<weight_t>& bag, int64_t rows_ahead, int64_t first_column,
                              int64_t columns, output_t* output) {
  const int64_t row_bytes = bag.dim * sizeof(weight_t);
  const int64_t asked = first_column == 0 ? bag.known - rows_ahead : 0;
  Vec sums[kVectors];
  for (int64_t v = 0; v < kVectors; ++v) sums[v] = zero();
  for (int64_t i = 0; i < bag.count; ++i) {
    if (i < asked) {
      const int64_t row = bag.rows[i + rows_ahead];
      prefetch_bytes(reinterpret_cast<uintptr_t>(bag.weight) + row * row_bytes, row_bytes);
    }
    const weight_t* row = bag.weight + bag.rows[i] * bag.dim + first_column;
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

// Pools bags [begin, end) of the flattened [batch, tables]: reads each id once, each row once, a
// stripe of columns after the other, and writes each output row once. `rows` has room for the ids
// of these bags. Returns the first position whose id is outside its table, or -1.
template <typename weight_t, typename output_t, typename id_t>
int64_t pool_bags(const weight_t* weight, const id_t* ids, const float* sample_weights,
                  const int64_t* bag_offsets, TableRanges ranges, int64_t tables, int64_t dim,
                  bool mean, output_t* output, int64_t* rows, int64_t begin, int64_t end) {
  constexpr int64_t kStripe = 8;  // vectors of sums in registers
  const int64_t rows_ahead = std::clamp<int64_t>(kBagAheadBytes / (dim * sizeof(weight_t)), 4, 64);
  const int64_t bad = find_rows(ids, bag_offsets, ranges, tables, rows, begin, end);
  if (bad >= 0) return bad;
  const int64_t first_id = bag_offsets[begin], last_id = bag_offsets[end];
  for (int64_t index = begin; index < end; ++index) {
    const int64_t first = bag_offsets[index], count = bag_offsets[index + 1] - first;
    const Bag<weight_t> bag{weight,
                            rows + (first - first_id),
                            sample_weights ? sample_weights + first : nullptr,
                            count,
                            last_id - first,
                            dim,
                            mean && count > 0 ? 1.0f / static_cast<float>(count) : 1.0f};
    output_t* row = output + index * dim;
    int64_t column = 0;
    for (; column + kStripe * kLanes <= dim; column += kStripe * kLanes) {
      pool_columns<kStripe>(bag, rows_ahead, column, 0, row);
    }
    for (; column + 2 * kLanes <= dim; column += 2 * kLanes) {
      pool_columns<2>(bag, rows_ahead, column, 0, row);
    }
    for (; column + kLanes <= dim; column += kLanes) {
      pool_columns<1>(bag, rows_ahead, column, 0, row);
    }
    if (column < dim) pool_columns<1>(bag, rows_ahead, column, dim - column, row);
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
