#pragma once
// Text tables with aligned columns.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "cli/output.h"

namespace tessera::cli {

// Text of these functions is valid UTF-8 without control characters, except the attributes of Output::bold and faint.

// Returns the terminal columns of a text: none for combining marks and attributes, two for East Asian wide characters
// and emoji.
std::size_t display_width(std::string_view text);

// Truncates `text` to `columns`, ending in "...", never within a character or attributes; `columns` 0 means no limit.
std::string truncate(std::string_view text, std::size_t columns);

// The same with "..." in the middle, for names with a common prefix.
std::string truncate_middle(std::string_view text, std::size_t columns);

// Breaks `text` into lines of at most `columns`, at spaces and within longer words. Lines after the first are indented.
// `columns` 0 means one line.
std::string wrap(std::string_view text, std::size_t columns);

// Prints `text`, wrapped, and a line break.
void print_wrapped(Output& out, std::string_view text);

// Rows of cells. If the terminal is too narrow, columns are truncated, the last first, to their minimum widths; if that
// is not enough, the last ones are omitted, which a line after the table names. Without a terminal nothing is
// truncated, and an overlong cell shifts the rest of its row. A cell must not contain line breaks.
class TextTable {
 public:
  enum class Align : unsigned char { left, right };
  struct Column {
    std::string title;
    Align align = Align::left;
    std::size_t min_width = 0;    // the width that it may be truncated to; 0 for never
    bool keep_both_ends = false;  // truncate_middle
  };

  explicit TextTable(std::vector<Column> columns, std::size_t indent = 0);
  void add(std::vector<std::string> row);
  void print(Output& out) const;

 private:
  std::vector<std::size_t> widths_within(std::size_t columns) const;
  std::vector<Column> columns_;
  std::vector<std::size_t> widths_;
  std::vector<std::vector<std::string>> rows_;
  std::size_t indent_;
};

}  // namespace tessera::cli
