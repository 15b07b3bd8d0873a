// Reads blocks of JSON lines, maps of columns to values, into columns of text.
//
// One pass reads each character once. A line that is no such map, and what JSON of Python reads
// besides, is left to the caller, with the whole block.
#pragma once

#include <bit>
#include <string>
#include <string_view>
#include <vector>

#include "text_cells.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace dlrm::host {

// Returns the first quote, backslash or control character of a text, or its end.
inline const char* find_end_of_plain(const char* p, const char* end) {
#if defined(__SSE2__)
  const __m128i quote = _mm_set1_epi8('"'), escape = _mm_set1_epi8('\\');
  const __m128i control = _mm_set1_epi8(0x1F);
  for (; end - p >= 16; p += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    __m128i found = _mm_or_si128(_mm_cmpeq_epi8(bytes, quote), _mm_cmpeq_epi8(bytes, escape));
    found = _mm_or_si128(found, _mm_cmpeq_epi8(_mm_min_epu8(bytes, control), bytes));
    const auto bits = static_cast<uint32_t>(_mm_movemask_epi8(found));
    if (bits != 0) return p + std::countr_zero(bits);
  }
#endif
  while (p != end && *p != '"' && *p != '\\' && static_cast<uint8_t>(*p) >= 0x20) ++p;
  return p;
}

// Tags of values; dlrm/data/sources/native.py has the same numbers.
enum class JsonTag : uint8_t {
  kText = 0,
  kNumber = 1,       // written as a typed value's text
  kOtherNumber = 2,  // in another notation, such as 1.50 or 1e6
};

class JsonReader {
 public:
  // Other columns than those of the names, which are the block's, are added to the block and not
  // kept.
  JsonReader(std::string_view text, const std::vector<std::string>& names, CellBlock& block)
      : p_(text.data()), end_(p_ + text.size()), block_(block) {
    for (const std::string& name : names) add_name(name);
  }

  void read() {
    while (p_ != end_) {
      ++block_.num_lines;
      skip_blanks();
      if (p_ != end_ && *p_ != '\n') {
        if (!read_map()) return undecided();
        fill_row();
        skip_blanks();
      }
      if (p_ != end_ && *p_++ != '\n') return undecided();
    }
  }

 private:
  struct Column {
    int64_t last_row;  // with the column
    bool plain;        // whether the name is written as it is, between quotes
  };

  void undecided() { block_.outcome = Outcome::kUndecided; }

  void add_name(std::string_view name) {
    const char* last = name.data() + name.size();
    columns_.push_back({-1, find_end_of_plain(name.data(), last) == last});
    block_.names.emplace_back(name);
  }

  void skip_blanks() {
    while (p_ != end_ && *p_ <= ' ' && (*p_ == ' ' || *p_ == '\t' || *p_ == '\r')) ++p_;
  }

  bool take(char character) {
    skip_blanks();
    if (p_ == end_ || *p_ != character) return false;
    ++p_;
    return true;
  }

  bool read_map() {
    if (!take('{')) return false;
    if (take('}')) return true;
    int64_t expected = 0;  // the column of the next name, as rows mostly have the same order
    do {
      if (!take('"')) return false;
      const int64_t column = read_name(expected);
      if (column < 0 || !take(':') || !read_value(block_.columns[column])) return false;
      expected = column + 1;
    } while (take(','));
    return take('}');
  }

  // Adds missing values of a row, and the row.
  void fill_row() {
    for (size_t i = 0; i < columns_.size(); ++i) {
      if (columns_[i].last_row != num_rows()) block_.columns[i].add_missing();
    }
    block_.lines.push_back(block_.num_lines);
  }

  // Reads a name behind its first quote; returns its column, or -1 as `column_of` does.
  int64_t read_name(int64_t expected) {
    if (expected < num_columns() && columns_[expected].plain) {
      const std::string& name = block_.names[expected];
      const auto size = static_cast<int64_t>(name.size());
      if (end_ - p_ > size && p_[size] == '"' && name == std::string_view(p_, size)) {
        p_ += size + 1;
        return column_in_row(expected);
      }
    }
    std::string_view name;
    return read_string(&name) ? column_of(name, expected) : -1;
  }

  // Returns the column of a name, which it adds; -1 if the row has it already.
  int64_t column_of(std::string_view name, int64_t expected) {
    int64_t column = expected;
    if (column >= num_columns() || block_.names[column] != name) {
      for (column = 0; column < num_columns() && block_.names[column] != name;) ++column;
      if (column == num_columns()) {
        add_name(name);
        block_.columns.push_back({Keep::kNothing});
      }
    }
    return column_in_row(column);
  }

  // Returns a column, or -1 if the row has it already.
  int64_t column_in_row(int64_t column) {
    if (columns_[column].last_row == num_rows()) return -1;
    columns_[column].last_row = num_rows();
    return column;
  }

  int64_t num_columns() const { return std::ssize(columns_); }

  int64_t num_rows() const { return std::ssize(block_.lines); }

  bool read_value(CellColumn& column) {
    skip_blanks();
    if (p_ == end_) return false;
    switch (*p_) {
      case '"': {
        ++p_;
        std::string_view text;
        if (!read_string(&text)) return false;
        column.add(text.data(), text.size());
        return true;
      }
      case 't':
        return read_word("true", &column);
      case 'f':
        return read_word("false", &column);
      case 'n':
        if (!read_word("null", nullptr)) return false;
        column.add_missing();
        return true;
      default:
        return read_number(column);
    }
  }

  bool read_word(std::string_view word, CellColumn* column) {
    if (static_cast<size_t>(end_ - p_) < word.size() || std::string_view(p_, word.size()) != word) {
      return false;
    }
    p_ += word.size();
    if (column != nullptr) column->add(word.data(), word.size());
    return true;
  }

  bool at_digit() const { return p_ != end_ && *p_ >= '0' && *p_ <= '9'; }

  bool skip_digits() {
    if (!at_digit()) return false;
    while (at_digit()) ++p_;
    return true;
  }

  bool read_number(CellColumn& column) {
    const char* begin = p_;
    p_ += *p_ == '-';
    const char* whole = p_;
    if (!skip_digits() || (*whole == '0' && p_ - whole > 1)) return false;
    const bool is_zero = *whole == '0';
    bool usual = !(is_zero && whole != begin);  // -0 and -0.5 are left to the caller
    if (p_ != end_ && *p_ == '.') {
      const char* fraction = ++p_;
      if (!skip_digits()) return false;
      usual = usual && p_[-1] != '0';
      if (is_zero && p_ - fraction >= 4 && std::memcmp(fraction, "0000", 4) == 0) usual = false;
    }
    if (p_ != end_ && (*p_ == 'e' || *p_ == 'E')) {
      ++p_;
      if (p_ != end_ && (*p_ == '+' || *p_ == '-')) ++p_;
      if (!skip_digits()) return false;
      usual = false;
    }
    const auto tag = usual ? JsonTag::kNumber : JsonTag::kOtherNumber;
    column.add(begin, p_ - begin, static_cast<uint8_t>(tag));
    return true;
  }

  // Reads a string behind its first quote.
  bool read_string(std::string_view* text) {
    const char* begin = p_;
    p_ = find_end_of_plain(p_, end_);
    if (p_ == end_) return false;
    if (*p_ == '"') {
      *text = std::string_view(begin, p_++ - begin);
      return true;
    }
    unescaped_.assign(begin, p_);
    while (p_ != end_ && *p_ != '"') {
      if (static_cast<uint8_t>(*p_) < 0x20) return false;
      if (*p_ != '\\') {
        unescaped_.push_back(*p_++);
      } else if (++p_; !read_escape()) {
        return false;
      }
    }
    if (p_ == end_) return false;
    ++p_;
    *text = unescaped_;
    return true;
  }

  bool read_escape() {
    if (p_ == end_) return false;
    const char kind = *p_++;
    if (kind == 'u') return read_unit();
    constexpr std::string_view kKinds = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
    const size_t place = kKinds.find(kind);
    if (place == std::string_view::npos) return false;
    unescaped_.push_back(kMeanings[place]);
    return true;
  }

  // Reads a character of one or two units of UTF-16; false if it is half of a pair.
  bool read_unit() {
    uint32_t code;
    if (!read_hexadecimal(&code) || (code >= 0xDC00 && code < 0xE000)) return false;
    if (code >= 0xD800 && code < 0xDC00) {
      uint32_t low;
      if (end_ - p_ < 2 || p_[0] != '\\' || p_[1] != 'u') return false;
      p_ += 2;
      if (!read_hexadecimal(&low) || low < 0xDC00 || low >= 0xE000) return false;
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    const auto add = [this](uint32_t byte) { unescaped_.push_back(static_cast<char>(byte)); };
    if (code < 0x80) {
      add(code);
    } else if (code < 0x800) {
      add(0xC0 | code >> 6), add(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
      add(0xE0 | code >> 12), add(0x80 | (code >> 6 & 0x3F)), add(0x80 | (code & 0x3F));
    } else {
      add(0xF0 | code >> 18), add(0x80 | (code >> 12 & 0x3F));
      add(0x80 | (code >> 6 & 0x3F)), add(0x80 | (code & 0x3F));
    }
    return true;
  }

  bool read_hexadecimal(uint32_t* code) {
    if (end_ - p_ < 4) return false;
    *code = 0;
    for (const char* last = p_ + 4; p_ != last; ++p_) {
      const char c = *p_;
      const bool digit = c >= '0' && c <= '9', lower = c >= 'a' && c <= 'f';
      if (!digit && !lower && !(c >= 'A' && c <= 'F')) return false;
      *code = *code << 4 | static_cast<uint32_t>(digit ? c - '0' : (c | 0x20) - 'a' + 10);
    }
    return true;
  }

  const char* p_;
  const char* end_;
  CellBlock& block_;
  std::vector<Column> columns_;
  std::string unescaped_;
};

}  // namespace dlrm::host
