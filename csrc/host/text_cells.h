// Columns of the cells of text files: the texts of a column, its distinct texts and the index of
// each cell's, or its numbers.
#pragma once

#include <limits>

#include "buffer.h"
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

  Keep keep;               // of numbers, `kNothing` after a cell that is none
  Buffer<double> numbers;  // of cells; NaN for missing ones
  Buffer<int32_t> codes;   // of cells, if distinct texts are kept; -1 for missing ones
  Buffer<int32_t> ends;    // of the texts in `data`
  Buffer<char> data;
  Buffer<uint8_t> tags;  // of distinct texts
  Buffer<Slot> slots;    // at least twice as many as texts

  // Adds a cell; texts that differ in their tag alone are distinct.
  void add(const char* text, int64_t size, uint8_t tag = 0) {
    if (keep == Keep::kTexts) {
      append(text, size);
    } else if (keep == Keep::kDistinct) {
      codes.add(find(text, size, tag));
    } else if (keep == Keep::kNumbers) {
      add_number(text, size);
    }
  }

  void add_missing() {
    if (keep == Keep::kDistinct) codes.add(-1);
    if (keep == Keep::kNumbers) add_number(nullptr, 0);
  }

  bool failed() const {
    return codes.failed || ends.failed || data.failed || tags.failed || slots.failed ||
           numbers.failed;
  }

  void release() {
    codes.release(), ends.release(), data.release(), tags.release(), slots.release();
    numbers.release();
  }

 private:
  void add_number(const char* text, int64_t size) {
    double number = std::numeric_limits<double>::quiet_NaN();
    if (size == 0 || read_double(text, text + size, &number)) {
      numbers.add(number);
    } else {
      keep = Keep::kNothing;
    }
  }

  bool append(const char* text, int64_t size) {
    return data.add(text, size) && ends.add(static_cast<int32_t>(data.size));
  }

  int32_t find(const char* text, int64_t size, uint8_t tag) {
    if (2 * ends.size >= slots.size && !grow()) return -1;
    const uint64_t hash = hash_text(reinterpret_cast<const uint8_t*>(text), size) + tag;
    const auto shape = static_cast<uint32_t>(size * 4 + tag);
    const uint64_t mask = slots.size - 1;
    for (uint64_t place = hash & mask;; place = (place + 1) & mask) {
      Slot& slot = slots[place];
      if (slot.index < 0) {
        if (!tags.add(tag) || !append(text, size)) return -1;
        slot = {hash, static_cast<int32_t>(ends.size - 1), shape};
        return slot.index;
      }
      // Texts of one word and one size have hashes of their own; the text itself is not read.
      if (slot.hash == hash && slot.shape == shape && (size <= 8 || is(slot.index, text, size))) {
        return slot.index;
      }
    }
  }

  bool is(int64_t index, const char* text, int64_t size) const {
    const int64_t begin = index == 0 ? 0 : ends[index - 1];
    return ends[index] - begin == size && std::memcmp(data.data + begin, text, size) == 0;
  }

  bool grow() {
    Buffer<Slot> larger;
    if (!larger.reserve(std::max<int64_t>(2 * slots.size, 64))) return !(slots.failed = true);
    larger.size = larger.capacity;
    std::fill(larger.data, larger.data + larger.size, Slot{0, -1, 0});
    const uint64_t mask = larger.size - 1;
    for (const Slot& slot : slots) {
      if (slot.index < 0) continue;
      uint64_t place = slot.hash & mask;
      while (larger[place].index >= 0) place = (place + 1) & mask;
      larger[place] = slot;
    }
    slots.release();
    slots = larger;
    return true;
  }
};

// What was found in a block of lines.
enum class Outcome : int64_t {
  kRows = 0,       // its rows
  kWidths = 1,     // lines that are rows, some of them with another number of cells
  kUndecided = 2,  // something that only the caller can decide
  kNoMemory = 3,
};

// The cells of a block of lines.
struct CellBlock {
  Buffer<CellColumn> columns;
  Buffer<int64_t> lines;  // of the rows, from 1
  Buffer<char> names;     // of the columns of JSON, each with a line feed
  int64_t num_lines = 0;
  Outcome outcome = Outcome::kRows;

  // Takes columns of which `keep` says what to keep.
  CellBlock(int64_t width, const uint8_t* keep) {
    for (int64_t i = 0; i < width; ++i) columns.add(CellColumn{static_cast<Keep>(keep[i])});
  }

  // Notes whether there was not enough memory.
  void finish() {
    bool failed = columns.failed || lines.failed || names.failed;
    for (const CellColumn& column : columns) failed = failed || column.failed();
    if (failed) outcome = Outcome::kNoMemory;
  }

  void release() {
    for (CellColumn* column = columns.data; column != columns.end(); ++column) column->release();
    columns.release(), lines.release(), names.release();
  }
};

}  // namespace dlrm::host
