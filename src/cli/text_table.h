#pragma once
// Aligned columns for people.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "cli/output.h"

namespace tessera::cli {

// Terminal columns that valid UTF-8 takes: none for combining marks, two for East Asian wide characters and emoji.
std::size_t display_width(std::string_view text);

// `text` cut to `columns` with "..." behind, never within a character; `columns` 0 means no limit.
std::string cut_to_width(std::string_view text, std::size_t columns);

// The same with "..." in the middle, for names that begin alike.
std::string cut_in_the_middle(std::string_view text, std::size_t columns);

// `text` broken at spaces, and within longer words, into lines of `columns` at most, those after the first indented;
// `columns` 0 means one line.
std::string wrap(std::string_view text, std::size_t columns);

// Rows of cells. Where the terminal is too narrow, columns are cut, from the last to the first, to no less than they
// may, and where that isn't enough the last ones are left out. Where there is no terminal nothing is cut, and an
// overlong cell pushes its own row's next ones to the right. A cell's text must be fit for one line.
class TextTable {
 public:
  enum class Align : unsigned char { left, right };
  struct Column {
    std::string title;
    Align align = Align::left;
    std::size_t least = 0;  // the width that it may be cut to; 0 for never
    bool cut_in_the_middle = false;
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
