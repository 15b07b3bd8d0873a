// Columns of the cells of text files: the texts of a column, its distinct texts and the index of
// each cell's, or its numbers.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "number_text.h"
#include "text_hash.h"

namespace dlrm::host {

// How the cells of a column are kept. dlrm/data/sources/native.py has the same numbers.
enum class Keep : uint8_t { kNothing = 0, kTexts = 1, kDistinct = 2, kNumbers = 3 };

struct CellColumn {
  struct Slot {
    uint64_t hash;
    int32_t index;   // of the text, or -1
    uint32_t shape;  // its size and its tag
  };

  Keep keep;                        // of numbers, `kNothing` after a cell that is none
  std::vector<double> numbers;      // of cells; NaN for missing ones
  std::vector<int32_t> codes;       // of cells, if distinct texts are kept; -1 for missing ones
  std::vector<int32_t> offsets{0};  // begins of the texts in `data`, and the end of the last
  std::vector<uint8_t> data;
  std::vector<uint8_t> tags;  // of distinct texts
  std::vector<Slot> slots;    // at least twice as many as texts

  // Adds a cell; texts that differ in their tag alone are distinct.
  void add(const char* text, int64_t size, uint8_t tag = 0) {
    if (keep == Keep::kTexts) {
      append(text, size);
    } else if (keep == Keep::kDistinct) {
      codes.push_back(find(text, size, tag));
    } else if (keep == Keep::kNumbers) {
      add_number(text, size);
    }
  }

  void add_missing() {
    if (keep == Keep::kDistinct) codes.push_back(-1);
    if (keep == Keep::kNumbers) add_number(nullptr, 0);
  }

 private:
  void add_number(const char* text, int64_t size) {
    double number = std::numeric_limits<double>::quiet_NaN();
    if (size == 0 || read_double(text, text + size, &number)) {
      numbers.push_back(number);
    } else {
      keep = Keep::kNothing;
    }
  }

  void append(const char* text, int64_t size) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(text);
    data.insert(data.end(), bytes, bytes + size);
    offsets.push_back(static_cast<int32_t>(data.size()));
  }

  int32_t find(const char* text, int64_t size, uint8_t tag) {
    if (2 * offsets.size() > slots.size()) grow();
    const uint64_t hash = hash_text(reinterpret_cast<const uint8_t*>(text), size) + tag;
    const auto shape = static_cast<uint32_t>(size * 4 + tag);
    const uint64_t mask = slots.size() - 1;
    for (uint64_t place = hash & mask;; place = (place + 1) & mask) {
      Slot& slot = slots[place];
      if (slot.index < 0) {
        slot = {hash, static_cast<int32_t>(tags.size()), shape};
        tags.push_back(tag);
        append(text, size);
        return slot.index;
      }
      // Texts of one word and one size have hashes of their own; the text itself is not read.
      if (slot.hash == hash && slot.shape == shape && (size <= 8 || is(slot.index, text, size))) {
        return slot.index;
      }
    }
  }

  bool is(int64_t index, const char* text, int64_t size) const {
    const int64_t begin = offsets[index];
    return offsets[index + 1] - begin == size && std::memcmp(data.data() + begin, text, size) == 0;
  }

  void grow() {
    std::vector<Slot> larger(std::max<size_t>(2 * slots.size(), 64), Slot{0, -1, 0});
    const uint64_t mask = larger.size() - 1;
    for (const Slot& slot : slots) {
      if (slot.index < 0) continue;
      uint64_t place = slot.hash & mask;
      while (larger[place].index >= 0) place = (place + 1) & mask;
      larger[place] = slot;
    }
    slots = std::move(larger);
  }
};

// What was found in a block of lines.
enum class Outcome : int64_t {
  kRows = 0,       // its rows
  kWidths = 1,     // lines that are rows, some of them with another number of cells
  kUndecided = 2,  // something that only the caller can decide
};

// The cells of a block of lines.
struct CellBlock {
  std::vector<CellColumn> columns;
  std::vector<int64_t> lines;      // of the rows, from 1
  std::vector<std::string> names;  // of the columns of JSON
  int64_t num_lines = 0;
  Outcome outcome = Outcome::kRows;

  // Takes columns of which `keep` says what to keep.
  explicit CellBlock(const std::vector<uint8_t>& keep) {
    for (const uint8_t kind : keep) columns.push_back({static_cast<Keep>(kind)});
  }
};

}  // namespace dlrm::host
