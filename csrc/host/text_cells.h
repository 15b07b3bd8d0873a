// Columns of the cells of text files: the texts of a column, its distinct texts and the index of
// each cell's, or its numbers.
#pragma once

#include <bit>
#include <limits>
#include <string>
#include <vector>

#include "number_text.h"
#include "text_hash.h"

namespace dlrm::host {

// How the cells of a column are kept. dlrm/data/sources/native.py has the same numbers.
enum class Keep : uint8_t { kNothing = 0, kTexts = 1, kDistinct = 2, kNumbers = 3 };

struct Cell {
  const char* begin;
  const char* end;
};

inline constexpr int64_t kRowsAtOnce = 64;  // whose cells are added together

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

  // Adds up to `kRowsAtOnce` cells, each `width` after another, most of them within [first, last).
  void add_rows(const Cell* cells, int64_t rows, int64_t width, const char* first,
                const char* last) {
    if (keep == Keep::kDistinct) {
      uint64_t hashes[kRowsAtOnce];
      while (2 * (offsets.size() + rows) > slots.size()) grow();
      for (int64_t i = 0; i < rows; ++i) {
        const Cell& cell = cells[i * width];
        hashes[i] = hash_of(cell.begin, cell.end - cell.begin, first, last);
        __builtin_prefetch(&slots[hashes[i] & (slots.size() - 1)]);
      }
      for (int64_t i = 0; i < rows; ++i) {
        const Cell& cell = cells[i * width];
        codes.push_back(find_hashed(hashes[i], cell.begin, cell.end - cell.begin, 0));
      }
      return;
    }
    for (int64_t i = 0; i < rows && keep != Keep::kNothing; ++i) {
      const Cell& cell = cells[i * width];
      add(cell.begin, cell.end - cell.begin);
    }
  }

  void reserve(int64_t rows) {
    if (keep == Keep::kTexts) offsets.reserve(rows + 1);
    if (keep == Keep::kDistinct) codes.reserve(rows);
    if (keep == Keep::kNumbers) numbers.reserve(rows);
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
    return find_hashed(hash_of(text, size, text, text + size) + tag, text, size, tag);
  }

  // Returns a number that differs between texts of one size of up to 8 bytes.
  static uint64_t hash_of(const char* text, int64_t size, const char* first, const char* last) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(text);
    if (size > 8) return hash_text(bytes, size);
    uint64_t word;
    if (std::endian::native == std::endian::little && size > 0 && text >= first &&
        last - text >= 8) {
      std::memcpy(&word, text, 8);
      word = word << (64 - 8 * size) >> (64 - 8 * size);
    } else {
      word = word_of(bytes, size);
    }
    const uint64_t hash = (word ^ static_cast<uint64_t>(size) * kLengthFactor) * kMixFactor;
    return hash ^ (hash >> 32);
  }

  int32_t find_hashed(uint64_t hash, const char* text, int64_t size, uint8_t tag) {
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

// What was found in a block of lines. dlrm/data/sources/native.py has the same numbers.
enum class Outcome : int64_t {
  kRows = 0,        // rows
  kUndecided = 1,   // something that only the caller can decide
  kPartial = 2,     // at the end, the beginning of a row
  kUnclosed = 3,    // a quote that nothing closes
  kAfterQuote = 4,  // text after a quote, or an escape character of nothing
  kManyLines = 5,   // a row of too many lines
};

// A row with another number of cells, which has no text in the columns.
struct BadRow {
  size_t row;
  size_t cells;
  std::string text;
};

// The cells of a block of lines.
struct CellBlock {
  std::vector<CellColumn> columns;
  std::vector<int64_t> lines;      // of the rows, from 1
  std::vector<std::string> names;  // of the columns of JSON
  int64_t num_lines = 0;
  Outcome outcome = Outcome::kRows;

  // Of CSV:
  int64_t consumed = 0;      // bytes that were read
  int64_t failed_lines = 0;  // of the row that cannot be read
  int64_t blank = 0;         // the first blank line, or 0
  std::vector<BadRow> bad;
  int64_t span_rows = 0, span_lines = 0, first_span = 0;  // rows of several lines

  // Takes columns of which `keep` says what to keep.
  explicit CellBlock(const std::vector<uint8_t>& keep) {
    for (const uint8_t kind : keep) columns.push_back({static_cast<Keep>(kind)});
  }

  bool keeps_nothing() const {
    for (const CellColumn& column : columns) {
      if (column.keep != Keep::kNothing) return false;
    }
    return true;
  }

  void reserve(int64_t rows) {
    lines.reserve(rows);
    for (CellColumn& column : columns) column.reserve(rows);
  }

  void add_span(int64_t first, int64_t lines) {
    ++span_rows;
    span_lines += lines;
    if (first_span == 0) first_span = first;
  }
};

}  // namespace dlrm::host
