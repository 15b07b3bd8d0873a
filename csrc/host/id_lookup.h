// Finds the id of a categorical value's number in a table sorted by a hash of the numbers.
//
// The hash is a bijection, so equal hashes mean equal numbers. Hashes are evenly distributed: the
// directory maps the first bits of one to the few entries that can hold it. Directory and entries
// are read in place, possibly in a mapped file that processes share.
#pragma once

#include <cstdint>

namespace dlrm::host {

inline constexpr uint64_t kHashFactor = 0x9E3779B97F4A7C15;  // odd, as required for a bijection

template <typename Id>
class IdTable {
 public:
  // `directory` has 2**k + 1 entries: the first entry whose hash starts with 0, 1, ...
  IdTable(const uint64_t* hashes, const Id* ids, const int64_t* directory, int64_t places)
      : hashes_(hashes), ids_(ids), directory_(directory) {
    while ((int64_t{1} << bits_) + 1 < places) ++bits_;
  }

  // The id of a number, or 0 if it has none.
  Id find(uint64_t number) const {
    const uint64_t hash = number * kHashFactor;
    const uint64_t prefix = bits_ == 0 ? 0 : hash >> (64 - bits_);
    const int64_t last = directory_[prefix + 1];
    for (int64_t i = directory_[prefix]; i < last; ++i) {
      if (hashes_[i] == hash) return ids_[i];
    }
    return Id{0};
  }

 private:
  const uint64_t* hashes_;
  const Id* ids_;
  const int64_t* directory_;
  int bits_ = 0;
};

// Writes the ids of numbers: that of row i is `output[i * stride]`. `IdLookup` in
// dlrm/data/transform/lookup.py has checked that the table's arrays fit together.
template <typename Id, typename Output>
void look_up(const IdTable<Id>& table, int64_t rows, const uint64_t* numbers, const bool* missing,
             Output* output, int64_t stride) {
  for (int64_t row = 0; row < rows; ++row) {
    output[row * stride] = missing[row] ? Id{0} : table.find(numbers[row]);
  }
}

}  // namespace dlrm::host
