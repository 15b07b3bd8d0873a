// Groups equal rows in stable order, each thread independently.
//
// The rows are cut into as many ranges as there are tasks, about equally many pairs in each. A task
// scans all pairs, keeps those of its own range and sorts them within its own cache, so tasks wait
// for each other only once, at the end of the update.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace dlrm {

constexpr int kDigitBits = 11;  // 2048 counters: they stay in the first-level cache
constexpr int64_t kSamplesPerShare = 256;

// Returns shares + 1 bounds, from 0 to total_rows: share k has the rows [bounds[k], bounds[k + 1]).
inline std::vector<int64_t> share_rows(const int64_t* rows, int64_t count, int64_t total_rows,
                                       int64_t shares) {
  std::vector<int64_t> bounds(shares + 1, total_rows);
  bounds[0] = 0;
  if (shares > 1) {
    const int64_t num_samples = std::min(count, shares * kSamplesPerShare);
    std::vector<int64_t> samples(num_samples);
    // Scattered positions, since regular ones might all be of one table.
    for (int64_t i = 0; i < num_samples; ++i) {
      const uint64_t scattered = static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15 >> 1;
      samples[i] = std::clamp<int64_t>(rows[scattered % count], 0, total_rows);
    }
    std::sort(samples.begin(), samples.end());
    for (int64_t k = 1; k < shares; ++k) bounds[k] = samples[k * num_samples / shares];
  }
  return bounds;
}

// The pairs of one range of rows, in order of row and then of position in the batch.
class SortedRows {
 public:
  SortedRows(const int64_t* rows, int64_t count, int64_t total_rows, int64_t first_row,
             int64_t end_row)
      : first_row_(first_row), position_bits_(bits_for(count)) {
    const auto span = static_cast<uint64_t>(end_row - first_row);
    uint64_t num_bad = 0, num_inside = 0;
    for (int64_t i = 0; i < count; ++i) {
      num_bad += static_cast<uint64_t>(rows[i]) >= static_cast<uint64_t>(total_rows);
      num_inside += static_cast<uint64_t>(rows[i]) - first_row < span;
    }
    if (num_bad > 0) {
      const auto is_bad = [=](int64_t row) { return row < 0 || row >= total_rows; };
      bad_position_ = std::find_if(rows, rows + count, is_bad) - rows;
      return;
    }
    size_ = static_cast<int64_t>(num_inside);
    keys_.reset(new uint64_t[size_ + 1]);
    uint64_t* next = keys_.get();
    for (int64_t i = 0; i < count; ++i) {  // without a branch: what is not inside is written over
      const uint64_t row = static_cast<uint64_t>(rows[i]) - first_row;
      *next = row << position_bits_ | static_cast<uint64_t>(i);
      next += row < span;
    }
    sort(bits_for(end_row - first_row));
  }

  // Position of the first row outside [0, total_rows), or -1. Every share searches all pairs and
  // finds the same; if there is one, there are no sorted pairs.
  int64_t bad_position() const { return bad_position_; }

  int64_t size() const { return size_; }
  int64_t row(int64_t i) const {
    return first_row_ + static_cast<int64_t>(keys_[i] >> position_bits_);
  }
  int64_t position(int64_t i) const {
    return static_cast<int64_t>(keys_[i] & ((uint64_t{1} << position_bits_) - 1));
  }

 private:
  static int bits_for(int64_t values) {
    return std::bit_width(static_cast<uint64_t>(std::max<int64_t>(values - 1, 0)));
  }

  void sort(int row_bits) {
    const int passes = (row_bits + kDigitBits - 1) / kDigitBits;
    if (passes == 0 || size_ <= 1) return;
    const int bits = (row_bits + passes - 1) / passes;
    const uint64_t mask = (uint64_t{1} << bits) - 1;
    std::unique_ptr<uint64_t[]> sorted(new uint64_t[size_]);
    std::array<int64_t, 1 << kDigitBits> places;
    for (int shift = position_bits_; shift < position_bits_ + row_bits; shift += bits) {
      places.fill(0);
      for (int64_t i = 0; i < size_; ++i) ++places[keys_[i] >> shift & mask];
      int64_t place = 0;
      for (int64_t& digit : places) place += std::exchange(digit, place);
      for (int64_t i = 0; i < size_; ++i) sorted[places[keys_[i] >> shift & mask]++] = keys_[i];
      std::swap(keys_, sorted);
    }
  }

  int64_t bad_position_ = -1;
  int64_t size_ = 0;
  int64_t first_row_;
  int position_bits_;
  std::unique_ptr<uint64_t[]> keys_;  // row and position in one word: one comparison orders both
};

}  // namespace dlrm
