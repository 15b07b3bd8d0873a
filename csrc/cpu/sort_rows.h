// Groups equal rows in stable order, each thread independently.
//
// The rows are cut into as many ranges as there are tasks, about equally many pairs in each. A task
// scans all pairs, keeps those of its own range and sorts them within its own cache, so tasks wait
// for each other only once, at the end of the update.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "../tensors.h"

namespace dlrm {

// Returns shares + 1 bounds, from 0 to total_rows: share k has the rows [bounds[k], bounds[k + 1]).
std::vector<int64_t> share_rows(const int64_t* rows, int64_t count, int64_t total_rows,
                                int64_t shares);

// The pairs of one range of rows, in order of row and then of position in the batch.
class SortedRows {
 public:
  SortedRows(const int64_t* rows, int64_t count, int64_t total_rows, int64_t first_row,
             int64_t end_row);

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
  void sort(int row_bits);

  int64_t bad_position_ = -1;
  int64_t size_ = 0;
  int64_t first_row_;
  int position_bits_;
  std::unique_ptr<uint64_t[]> keys_;  // row and position in one word: one comparison orders both
};

}  // namespace dlrm
