// Kernels of joint_embedding for one instruction set; see for_each_isa.h.

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
