// Splits blocks of CSV into columns.
//
// Delimiters, quotes and line ends are found 64 bytes at a time; each byte of a cell is read once
// more, when its text is hashed or copied. Rows of one line, with quotes around whole cells, are
// read so; other rows byte by byte, by the rules of Python's csv module in its strict mode, or by
// Spark's if there is an escape character.
#pragma once

#include <bit>
#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text_cells.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace dlrm::host {

inline constexpr int64_t kMostLines = 100;  // of a row; a stray quote joins all between two

struct CsvFormat {
  char delimiter;
  int quote;   // a character, or -1
  int escape;  // one that takes its meaning from a quote, a delimiter or itself, or -1
  bool plain;  // line feeds end lines, and there are no escapes
  bool lines;  // a row of several lines, or one with another quote, is left to the caller
  bool last;   // nothing follows the text
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
      : begin_(text.data()),
        place_(begin_),
        end_(begin_ + text.size()),
        format_(format),
        counts_only_(block.keeps_nothing()),
        marks_(marks_from(begin_)),
        block_(block) {}

  void read() {
    while (place_ != end_ && block_.outcome == Outcome::kRows) {
      if (!format_.plain || !(counts_only_ ? count_line() : read_line())) read_row();
      if (block_.lines.size() == kFirstRows) {
        block_.reserve((end_ - begin_) / ((place_ - begin_) / kFirstRows));
      }
    }
    add_cells();
    block_.consumed = place_ - begin_;
  }

  // Reads one row, and returns its cells.
  std::vector<std::string> read_first() {
    std::vector<std::string> cells;
    if (place_ != end_ && split_row()) {
      for (const Cell& cell : cells_) cells.emplace_back(cell.begin, cell.end);
    }
    block_.consumed = place_ - begin_;
    return cells;
  }

 private:
  static constexpr int64_t kFirstRows = 1024;

  Marks marks_from(const char* place) const {
    const char delimiter = counts_only_ ? '\n' : format_.delimiter;
    const char quote = format_.quote < 0 ? '\n' : static_cast<char>(format_.quote);
    return Marks(place, end_ - place, '\n', delimiter, quote);
  }

  // Reads a row of one line; false, with nothing done, if it is of another form.
  bool read_line() {
    const char* p = place_;
    cells_.resize(row_);
    while (true) {
      Cell cell;
      const char* mark = marks_.next();  // that ends the cell
      const bool quoted = is_quote(mark);
      if (quoted) {
        if (mark != p || !read_quoted(&cell, &mark)) return false;
      } else {
        const bool last = mark == end_ || *mark == '\n';
        cell = {p, mark - (last && mark != p && mark[-1] == '\r')};
      }
      p = mark == end_ ? end_ : mark + 1;
      const bool last = mark == end_ || *mark == '\n';
      if (last && cells_.size() == row_ && cell.begin == cell.end && !quoted) return end_blank(p);
      cells_.push_back(cell);
      if (last) break;
    }
    ++block_.num_lines;
    place_ = p;
    add_row();
    return true;
  }

  // Counts a row of one line, whose cells are not; false if it is of another form.
  bool count_line() {
    const char* mark = marks_.next();
    for (Cell cell; is_quote(mark);) {
      if (mark != place_ && mark[-1] != format_.delimiter) return false;
      if (!read_quoted(&cell, &mark)) return false;
      if (mark != end_ && *mark != '\n') mark = marks_.next();
    }
    const int64_t size = mark - place_;
    const char* next = mark == end_ ? end_ : mark + 1;
    if (size == 0 || (size == 1 && *place_ == '\r')) return end_blank(next);
    block_.lines.push_back(++block_.num_lines);
    place_ = next;
    return true;
  }

  bool end_blank(const char* next) {
    ++block_.num_lines;
    if (block_.blank == 0) block_.blank = block_.num_lines;
    place_ = next;
    return true;
  }

  // Reads a cell from its first quote on, and finds the mark after it; false if it does not end on
  // the line, or text follows.
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
    *cell = {begin, *mark};
    if (doubled && !counts_only_) *cell = with_single_quotes(*cell);
    const char* after = *mark + 1;
    if (counts_only_ && after != end_ && *after == format_.delimiter) return *mark = after, true;
    *mark = marks_.next();
    if (*mark != after && *after == '\r' && (*mark == end_ || **mark == '\n')) ++after;
    return *mark == after;
  }

  // Reads a row of any form.
  void read_row() {
    if (format_.lines) {
      block_.outcome = Outcome::kUndecided;
    } else {
      add_cells();
      if (split_row()) add_row();
      add_cells();  // before their texts are replaced
    }
    marks_ = marks_from(place_);
  }

  // Finds the cells of a row of any form, which may be blank; false if there is none.
  bool split_row() {
    const char* p = place_;
    int64_t lines = 1;
    texts_.clear();
    ends_.clear();
    const bool blank = line_end(p) > 0;
    while (!blank) {
      while (p != end_ && *p == ' ') ++p;
      const bool quoted = is_quote(p);
      if (quoted && !split_quoted(&p, &lines)) return false;
      while (!quoted && p != end_ && *p != format_.delimiter && line_end(p) == 0) {
        if (format_.quote < 0 && *p == format_.escape) {
          if (p + 1 == end_ || line_end(p + 1) > 0) return fail(Outcome::kAfterQuote, lines);
          unescape(&p);
        } else {
          texts_.push_back(*p++);
        }
      }
      while (quoted && format_.escape >= 0 && p != end_ && *p == ' ') ++p;
      ends_.push_back(texts_.size());
      if (p == end_ || line_end(p) > 0) break;
      if (*p != format_.delimiter) return fail(Outcome::kAfterQuote, lines);
      ++p;
    }
    p += p == end_ ? 0 : line_end(p);
    if (blank) return end_blank(p), false;
    cells_.clear();
    size_t begin = 0;
    for (const size_t end : ends_) {
      cells_.push_back({texts_.data() + begin, texts_.data() + end});
      begin = end;
    }
    if (lines > 1) block_.add_span(block_.num_lines + 1, lines);
    block_.num_lines += lines;
    place_ = p;
    return true;
  }

  // Appends the text of a cell from its first quote on to `texts_`.
  bool split_quoted(const char** place, int64_t* lines) {
    const char* p = *place + 1;
    while (p != end_ && (!is_quote(p) || (format_.escape < 0 && is_quote(p + 1)))) {
      if (*p == format_.escape && p + 1 != end_) {
        unescape(&p);
        continue;
      }
      p += is_quote(p);
      *lines += *p == '\n' || (*p == '\r' && (p + 1 == end_ || p[1] != '\n'));
      if (*lines > kMostLines) return fail(Outcome::kManyLines, *lines);
      texts_.push_back(*p++);
    }
    if (p == end_) return fail(format_.last ? Outcome::kUnclosed : Outcome::kPartial, *lines);
    *place = p + 1;
    return true;
  }

  void unescape(const char** place) {
    const char escaped = (*place)[1];
    const bool meant = escaped == format_.delimiter || escaped == format_.escape ||
                       (format_.quote >= 0 && escaped == format_.quote);
    if (!meant) texts_.push_back(**place);
    *place += meant;
    if (meant) texts_.push_back(escaped);
    ++*place;
  }

  bool fail(Outcome outcome, int64_t lines) {
    block_.outcome = outcome;
    block_.failed_lines = lines;
    return false;
  }

  // Adds the row that ends `cells_`.
  void add_row() {
    const size_t width = block_.columns.size(), count = cells_.size() - row_;
    if (!counts_only_ && count != width) {
      std::string text;
      for (size_t i = row_; i < cells_.size(); ++i) {
        if (i != row_) text += format_.delimiter;
        text.append(cells_[i].begin, cells_[i].end);
      }
      block_.bad.push_back({block_.lines.size(), count, std::move(text)});
      cells_.resize(row_);
      cells_.resize(row_ + width, Cell{end_, end_});
    }
    block_.lines.push_back(block_.num_lines);
    if (counts_only_) cells_.clear();
    row_ = cells_.size();
    if (row_ >= kRowsAtOnce * width) add_cells();
  }

  void add_cells() {
    const int64_t width = block_.columns.size(), rows = width == 0 ? 0 : row_ / width;
    for (int64_t i = 0; i < width && rows > 0; ++i) {
      block_.columns[i].add_rows(cells_.data() + i, rows, width, begin_, end_);
    }
    cells_.clear();
    unquoted_.clear();
    row_ = 0;
  }

  Cell with_single_quotes(const Cell& cell) {
    std::string& text = unquoted_.emplace_back();
    for (const char* p = cell.begin; p != cell.end; ++p) {
      text.push_back(*p);
      p += is_quote(p);
    }
    return {text.data(), text.data() + text.size()};
  }

  bool is_quote(const char* place) const {
    return place != end_ && format_.quote >= 0 && *place == static_cast<char>(format_.quote);
  }

  // Returns the size of a line end at a place; 0 if there is none.
  int64_t line_end(const char* place) const {
    if (*place == '\n') return 1;
    if (*place != '\r') return 0;
    return place + 1 != end_ && place[1] == '\n' ? 2 : 1;
  }

  const char* begin_;
  const char* place_;  // of the next row
  const char* end_;
  CsvFormat format_;
  bool counts_only_;
  Marks marks_;
  CellBlock& block_;
  std::vector<Cell> cells_;           // of some rows, which are added together
  size_t row_ = 0;                    // the first cell of the row that is read
  std::deque<std::string> unquoted_;  // texts of cells with doubled quotes
  std::string texts_;                 // of the cells of a row that is not read as a line
  std::vector<size_t> ends_;          // of these texts
};

}  // namespace dlrm::host
