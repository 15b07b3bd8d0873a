// Splits blocks of CSV whose rows are lines into columns.
//
// Delimiters, quotes and line ends are found 64 bytes at a time; each byte of a cell is read once
// more, when its text is hashed or copied. Quotes may only stand around whole cells, and twice for
// a quote within them. Whatever else there is, the caller decides.
#pragma once

#include <bit>
#include <string>
#include <string_view>

#include "text_cells.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace dlrm::host {

struct CsvFormat {
  char delimiter;
  int quote;  // a character, or -1
  int64_t longest_line;
};

// Finds, one after another, the places of three characters in a text.
class Marks {
 public:
  Marks(const char* text, int64_t size, char first, char second, char third)
      : text_(text), end_(text + size), marks_{first, second, third} {
    bits_ = size > 0 ? find() : 0;
  }

  // Returns the next place, or the end of the text.
  const char* next() {
    while (bits_ == 0) {
      if (end_ - text_ <= kWidth) return end_;
      text_ += kWidth;
      bits_ = find();
    }
    const char* place = text_ + std::countr_zero(bits_);
    bits_ &= bits_ - 1;
    return place;
  }

 private:
  static constexpr int64_t kWidth = 64;

  uint64_t find() const {
    if (end_ - text_ >= kWidth) return find_in(text_);
    char last[kWidth] = {};  // marks are not 0
    std::memcpy(last, text_, end_ - text_);
    return find_in(last);
  }

  uint64_t find_in(const char* text) const {
    uint64_t bits = 0;
#if defined(__SSE2__)
    for (int i = 0; i < 4; ++i) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(text) + i);
      __m128i found = _mm_cmpeq_epi8(bytes, _mm_set1_epi8(marks_[0]));
      found = _mm_or_si128(found, _mm_cmpeq_epi8(bytes, _mm_set1_epi8(marks_[1])));
      found = _mm_or_si128(found, _mm_cmpeq_epi8(bytes, _mm_set1_epi8(marks_[2])));
      bits |= static_cast<uint64_t>(static_cast<uint32_t>(_mm_movemask_epi8(found))) << (16 * i);
    }
#else
    for (int i = 0; i < kWidth; ++i) {
      const bool is = text[i] == marks_[0] || text[i] == marks_[1] || text[i] == marks_[2];
      bits |= static_cast<uint64_t>(is) << i;
    }
#endif
    return bits;
  }

  const char* text_;
  const char* end_;
  char marks_[3];
  uint64_t bits_ = 0;
};

class CsvReader {
 public:
  CsvReader(std::string_view text, const CsvFormat& format, CellBlock& block)
      : place_(text.data()),
        end_(place_ + text.size()),
        format_(format),
        marks_(place_, text.size(), '\n', format.delimiter,
               format.quote < 0 ? '\n' : static_cast<char>(format.quote)),
        block_(block) {}

  void read() {
    while (place_ != end_ && block_.outcome != Outcome::kUndecided) read_line();
  }

 private:
  struct Cell {
    const char* begin;
    const char* end;
    bool quoted;
  };

  void read_line() {
    const char* line = place_;
    const int64_t width = block_.columns.size();
    int64_t column = 0;
    ++block_.num_lines;
    for (bool last = false; !last; ++column) {
      Cell cell;
      const char* mark;  // that ends it
      if (!read_cell(&cell, &mark) || mark - line >= format_.longest_line) {
        block_.outcome = Outcome::kUndecided;
        return;
      }
      last = mark == end_ || *mark == '\n';
      place_ = mark == end_ ? end_ : mark + 1;
      if (last && column == 0 && cell.begin == cell.end && !cell.quoted) return;  // a blank line
      if (column < width && block_.outcome == Outcome::kRows) {
        block_.columns[column].add(cell.begin, cell.end - cell.begin);
      }
    }
    if (column != width) block_.outcome = Outcome::kWidths;
    block_.lines.push_back(block_.num_lines);
  }

  bool read_cell(Cell* cell, const char** mark) {
    const char* begin = place_;
    *mark = marks_.next();
    if (is_quote(*mark)) return *mark == begin && read_quoted(cell, mark);
    const bool last = *mark == end_ || **mark == '\n';
    *cell = {begin, *mark - (last && *mark != begin && (*mark)[-1] == '\r'), false};
    return true;
  }

  // Reads a cell from its first quote on; false if it does not end on the line, or text follows.
  bool read_quoted(Cell* cell, const char** mark) {
    const char* begin = *mark + 1;
    bool doubled = false;
    for (*mark = marks_.next(); !is_quote(*mark) || is_quote(*mark + 1); *mark = marks_.next()) {
      if (*mark == end_ || **mark == '\n') return false;
      if (is_quote(*mark)) {
        marks_.next();
        doubled = true;
      }
    }
    *cell = {begin, *mark, true};
    if (doubled) {
      unquoted_.clear();
      for (const char* p = begin; p != *mark; ++p) {
        unquoted_.push_back(*p);
        p += is_quote(p);
      }
      *cell = {unquoted_.data(), unquoted_.data() + unquoted_.size(), true};
    }
    const char* after = *mark + 1;
    *mark = marks_.next();
    if (*mark != after && *after == '\r' && (*mark == end_ || **mark == '\n')) ++after;
    return *mark == after;
  }

  bool is_quote(const char* place) const {
    return place != end_ && format_.quote >= 0 && *place == static_cast<char>(format_.quote);
  }

  const char* place_;  // of the next cell
  const char* end_;
  CsvFormat format_;
  Marks marks_;
  CellBlock& block_;
  std::string unquoted_;  // the text of a cell with quotes
};

}  // namespace dlrm::host
