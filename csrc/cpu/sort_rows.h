// Brings equal rows together without disturbing their order: a parallel radix sort.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "../tensors.h"

namespace dlrm {

// A row and its position in the batch in one word, so that one comparison orders both.
class SortedRows {
 public:
  // Throws, naming `name`, row and position, where a row is outside [0, total_rows).
  SortedRows(const char* name, const int64_t* rows, int64_t count, int64_t total_rows);

  int64_t count() const { return count_; }
  int64_t row(int64_t i) const { return static_cast<int64_t>(keys_[i] >> position_bits_); }
  int64_t position(int64_t i) const {
    return static_cast<int64_t>(keys_[i] & ((uint64_t{1} << position_bits_) - 1));
  }
  // The first i' >= i that starts a run of equal rows.
  int64_t run_start(int64_t i) const {
    while (i > 0 && i < count_ && row(i) == row(i - 1)) ++i;
    return i;
  }

 private:
  int64_t count_;
  int position_bits_;
  std::unique_ptr<uint64_t[]> keys_;
};

}  // namespace dlrm
