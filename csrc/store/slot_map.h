// Maps numbers to slots by open addressing with linear probing, without marks for erased ones.
#pragma once

#include <cstdint>
#include <vector>

namespace dlrm::store {

class SlotMap {
 public:
  // Room for `slots` numbers; at most half of the places are taken.
  explicit SlotMap(int64_t slots) {
    int bits = 4;
    while ((int64_t{1} << bits) < 2 * slots) ++bits;
    shift_ = 64 - bits;
    mask_ = (uint64_t{1} << bits) - 1;
    numbers_.assign(mask_ + 1, -1);
    slots_.assign(mask_ + 1, 0);
  }

  // The slot of a number, or -1.
  int32_t find(int64_t number) const {
    for (uint64_t place = home(number);; place = (place + 1) & mask_) {
      if (numbers_[place] == number) return slots_[place];
      if (numbers_[place] < 0) return -1;
    }
  }

  // Fetches what `find` will read.
  void prefetch(int64_t number) const { __builtin_prefetch(&numbers_[home(number)]); }

  // The number must not be there yet.
  void insert(int64_t number, int32_t slot) {
    uint64_t place = home(number);
    while (numbers_[place] >= 0) place = (place + 1) & mask_;
    numbers_[place] = number;
    slots_[place] = slot;
  }

  // The number must be present. Later numbers of its probe sequence move up.
  void erase(int64_t number) {
    uint64_t hole = home(number);
    while (numbers_[hole] != number) hole = (hole + 1) & mask_;
    for (uint64_t next = (hole + 1) & mask_; numbers_[next] >= 0; next = (next + 1) & mask_) {
      if (((next - home(numbers_[next])) & mask_) < ((next - hole) & mask_)) continue;
      numbers_[hole] = numbers_[next];
      slots_[hole] = slots_[next];
      hole = next;
    }
    numbers_[hole] = -1;
  }

 private:
  uint64_t home(int64_t number) const {
    return (static_cast<uint64_t>(number) * 0x9E3779B97F4A7C15) >> shift_;
  }

  int shift_;
  uint64_t mask_;
  std::vector<int64_t> numbers_;  // -1: none
  std::vector<int32_t> slots_;
};

}  // namespace dlrm::store
