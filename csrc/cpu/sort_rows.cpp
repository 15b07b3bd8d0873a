#include "sort_rows.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "first_bad.h"

namespace dlrm {
namespace {

constexpr int kDigitBits = 11;  // 2048 counters: they stay in the first-level cache
constexpr int64_t kKeysPerTask = 8192;

void pack(const char* name, const int64_t* rows, int64_t count, int64_t total_rows,
          int position_bits, uint64_t* keys) {
  FirstBad bad;
  torch::stable::parallel_for(0, count, kKeysPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto row = static_cast<uint64_t>(rows[i]);
      if (row >= static_cast<uint64_t>(total_rows)) return bad.report(i);
      keys[i] = row << position_bits | static_cast<uint64_t>(i);
    }
  });
  if (bad.any()) {
    check(false, name, ": row ", rows[bad.position()], " at position ", bad.position(),
          ": expected 0 <= row < ", total_rows);
  }
}

// One stable pass by `bits` bits above `shift`. Each of `tasks` counts, then places, its own share.
void sort_by_digit(const uint64_t* from, uint64_t* to, int64_t count, int shift, int bits,
                   int64_t tasks, std::vector<int64_t>& places) {
  const int64_t digits = int64_t{1} << bits;
  const uint64_t mask = digits - 1;
  const int64_t share = (count + tasks - 1) / tasks;
  places.assign(tasks * digits, 0);
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      int64_t* counts = places.data() + task * digits;
      const int64_t end = std::min(count, (task + 1) * share);
      for (int64_t i = task * share; i < end; ++i) ++counts[from[i] >> shift & mask];
    }
  });
  int64_t place = 0;
  for (int64_t digit = 0; digit < digits; ++digit) {
    for (int64_t task = 0; task < tasks; ++task) {
      place += std::exchange(places[task * digits + digit], place);
    }
  }
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      int64_t* next = places.data() + task * digits;
      const int64_t end = std::min(count, (task + 1) * share);
      for (int64_t i = task * share; i < end; ++i) to[next[from[i] >> shift & mask]++] = from[i];
    }
  });
}

}  // namespace

SortedRows::SortedRows(const char* name, const int64_t* rows, int64_t count, int64_t total_rows)
    : count_(count),
      position_bits_(std::bit_width(static_cast<uint64_t>(std::max<int64_t>(count - 1, 1)))),
      keys_(new uint64_t[count]) {
  const int row_bits = std::bit_width(static_cast<uint64_t>(std::max<int64_t>(total_rows - 1, 0)));
  check(row_bits + position_bits_ <= 64, name, ": ", count, " gradients of ", total_rows,
        " rows are more than 64 bits can number");
  pack(name, rows, count, total_rows, position_bits_, keys_.get());

  const int64_t tasks = std::clamp<int64_t>((count + kKeysPerTask - 1) / kKeysPerTask, 1,
                                            torch::stable::get_num_threads());
  const int passes = (row_bits + kDigitBits - 1) / kDigitBits;
  const int bits = passes == 0 ? 0 : (row_bits + passes - 1) / passes;
  std::unique_ptr<uint64_t[]> other(new uint64_t[count]);
  std::vector<int64_t> places;
  for (int pass = 0; pass < passes; ++pass) {
    sort_by_digit(keys_.get(), other.get(), count, position_bits_ + pass * bits, bits, tasks,
                  places);
    std::swap(keys_, other);
  }
}

}  // namespace dlrm
