#include "sort_rows.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

namespace dlrm {
namespace {

constexpr int kDigitBits = 11;  // 2048 counters: they stay in the first-level cache
constexpr int64_t kSamplesPerShare = 256;

int bits_for(int64_t values) {
  return std::bit_width(static_cast<uint64_t>(std::max<int64_t>(values - 1, 0)));
}

}  // namespace

std::vector<int64_t> share_rows(const int64_t* rows, int64_t count, int64_t total_rows,
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

SortedRows::SortedRows(const int64_t* rows, int64_t count, int64_t total_rows, int64_t first_row,
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

void SortedRows::sort(int row_bits) {
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

}  // namespace dlrm
