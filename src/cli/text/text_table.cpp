#include "cli/text/text_table.h"

#include <algorithm>
#include <array>
#include <utility>

#include "tessera/base/internal/utf8.h"

namespace tessera::cli {
namespace {

constexpr std::size_t kGap = 2;
constexpr std::size_t kMostPadding = 100;

char32_t decode(std::string_view text, std::size_t length) {
  const auto byte = [&](std::size_t i) { return static_cast<char32_t>(static_cast<unsigned char>(text[i])); };
  switch (length) {
    case 1:
      return byte(0);
    case 2:
      return ((byte(0) & 0x1f) << 6) | (byte(1) & 0x3f);
    case 3:
      return ((byte(0) & 0x0f) << 12) | ((byte(1) & 0x3f) << 6) | (byte(2) & 0x3f);
    default:
      return ((byte(0) & 0x07) << 18) | ((byte(1) & 0x3f) << 12) | ((byte(2) & 0x3f) << 6) | (byte(3) & 0x3f);
  }
}

// The Unicode blocks that matter in names.
std::size_t character_width(char32_t c) {
  using Range = std::pair<char32_t, char32_t>;
  static constexpr std::array<Range, 8> kNone = {{{0x300, 0x36f},
                                                  {0x483, 0x489},
                                                  {0x591, 0x5bd},
                                                  {0x200b, 0x200f},
                                                  {0x202a, 0x202e},
                                                  {0x20d0, 0x20f0},
                                                  {0xfe00, 0xfe0f},
                                                  {0xe0100, 0xe01ef}}};
  static constexpr std::array<Range, 9> kWide = {{{0x1100, 0x115f},
                                                  {0x2e80, 0x303e},
                                                  {0x3041, 0xa4cf},
                                                  {0xac00, 0xd7a3},
                                                  {0xf900, 0xfaff},
                                                  {0xfe30, 0xfe6f},
                                                  {0xff00, 0xff60},
                                                  {0x1f300, 0x1faff},
                                                  {0x20000, 0x3fffd}}};
  const auto holds = [c](const Range& range) { return c >= range.first && c <= range.second; };
  if (c < 0x300) return 1;
  if (std::any_of(kNone.begin(), kNone.end(), holds)) return 0;
  return std::any_of(kWide.begin(), kWide.end(), holds) ? 2 : 1;
}

// The length of the terminal attributes at the begin of `text`, "\x1b[1m"; 0 if there are none. Other text has no
// escape character.
std::size_t attributes_length(std::string_view text) {
  return text.starts_with('\x1b') ? text.find('m') + 1 : 0;  // 0 without an end
}

// Calls visit(length in bytes, width in columns) for each character and for each sequence of terminal attributes, until
// it returns false.
template <typename Visit>
void for_each_character(std::string_view text, const Visit& visit) {
  while (!text.empty()) {
    const std::size_t attributes = attributes_length(text);
    const std::size_t length = attributes > 0 ? attributes : std::max<std::size_t>(utf8_sequence_length(text), 1);
    if (!visit(length, attributes > 0 ? 0 : character_width(decode(text, length)))) return;
    text.remove_prefix(length);
  }
}

// The longest prefix of `text` that fits into `columns`.
std::string_view prefix(std::string_view text, std::size_t columns) {
  std::size_t bytes = 0, width = 0;
  for_each_character(text, [&](std::size_t length, std::size_t character_columns) {
    if (width + character_columns > columns) return false;
    bytes += length;
    width += character_columns;
    return true;
  });
  return text.substr(0, bytes);
}

}  // namespace

std::size_t display_width(std::string_view text) {
  std::size_t width = 0;
  for_each_character(text, [&](std::size_t, std::size_t columns) {
    width += columns;
    return true;
  });
  return width;
}

std::string truncate(std::string_view text, std::size_t columns) {
  if (columns == 0 || display_width(text) <= columns) return std::string(text);
  return std::string(prefix(text, columns < 4 ? columns : columns - 3)) + (columns < 4 ? "" : "...");
}

std::string truncate_middle(std::string_view text, std::size_t columns) {
  const std::size_t full_width = display_width(text);
  if (columns < 8 || full_width <= columns) return truncate(text, columns);
  const std::size_t head_columns = (columns - 3) / 2, tail_columns = columns - 3 - head_columns;
  std::size_t width = 0, bytes = 0, head_bytes = 0, tail_begin = text.size();
  for_each_character(text, [&](std::size_t length, std::size_t character_columns) {
    if (full_width - width <= tail_columns) {
      tail_begin = bytes;
      return false;
    }
    width += character_columns;
    bytes += length;
    if (width <= head_columns) head_bytes = bytes;
    return true;
  });
  return std::string(text.substr(0, head_bytes)) + "..." + std::string(text.substr(tail_begin));
}

std::string wrap(std::string_view text, std::size_t columns) {
  constexpr std::string_view kIndent = "  ";
  constexpr std::size_t kLeastForWords = 10;
  std::string lines;
  std::size_t used = 0;
  while (!text.empty()) {
    std::string_view word = text.substr(0, text.find(' '));
    const bool is_long = columns > kLeastForWords && display_width(word) > columns - kIndent.size();
    if (is_long) word = prefix(word, columns - kIndent.size());
    text.remove_prefix(std::min(text.size(), word.size() + (is_long ? 0 : 1)));
    const std::size_t width = display_width(word);
    if (columns > 0 && used > kIndent.size() && used + 1 + width > columns) {
      lines += "\n";
      lines += kIndent;
      used = kIndent.size();
    } else if (!lines.empty()) {
      lines += " ";
      ++used;
    }
    lines += word;
    used += width;
  }
  return lines;
}

void print_wrapped(Output& out, std::string_view text) { out.write(wrap(text, out.columns()) + "\n"); }

TextTable::TextTable(std::vector<Column> columns, std::size_t indent) : columns_(std::move(columns)), indent_(indent) {
  for (const Column& column : columns_) widths_.push_back(display_width(column.title));
}

void TextTable::add(std::vector<std::string> row) {
  for (std::size_t i = 0; i < row.size(); ++i) widths_[i] = std::max(widths_[i], display_width(row[i]));
  rows_.push_back(std::move(row));
}

std::vector<std::size_t> TextTable::widths_within(std::size_t columns) const {
  std::vector<std::size_t> widths = widths_;
  if (columns == 0) {
    for (std::size_t& width : widths) width = std::min(width, kMostPadding);
    return widths;
  }
  const auto least_of = [&](std::size_t i) {
    return columns_[i].min_width == 0 ? widths[i] : std::min(widths[i], columns_[i].min_width);
  };
  std::size_t least = indent_ + kGap * (widths.size() - 1);
  for (std::size_t i = 0; i < widths.size(); ++i) least += least_of(i);
  while (least > columns && widths.size() > 1 && columns_[widths.size() - 1].min_width > 0) {
    least -= least_of(widths.size() - 1) + kGap;
    widths.pop_back();
  }
  std::size_t total = indent_ + kGap * (widths.size() - 1);
  for (const std::size_t width : widths) total += width;
  for (std::size_t i = widths.size(); i-- > 0 && total > columns;) {
    if (columns_[i].min_width == 0 || widths[i] <= columns_[i].min_width) continue;
    const std::size_t less = std::min(total - columns, widths[i] - columns_[i].min_width);
    widths[i] -= less;
    total -= less;
  }
  return widths;
}

void TextTable::print(Output& out) const {
  const std::vector<std::size_t> widths = widths_within(out.columns());
  const auto line = [&](const auto& cell_text) {
    std::string text(indent_, ' ');
    for (std::size_t i = 0; i < widths.size(); ++i) {
      std::string cell(cell_text(i));
      if (out.columns() > 0 && columns_[i].min_width > 0) {
        cell = columns_[i].keep_both_ends ? truncate_middle(cell, widths[i]) : truncate(cell, widths[i]);
      }
      const std::size_t width = display_width(cell);
      const std::size_t padding = widths[i] > width ? widths[i] - width : 0;
      if (columns_[i].align == Align::right) text.append(padding, ' ');
      text += cell;
      if (i + 1 < widths.size()) text.append(kGap + (columns_[i].align == Align::left ? padding : 0), ' ');
    }
    return text;
  };
  out.write(out.faint(line([&](std::size_t i) -> const std::string& { return columns_[i].title; })) + "\n");
  for (const std::vector<std::string>& row : rows_) {
    out.write(line([&](std::size_t i) -> const std::string& { return row[i]; }) + "\n");
  }
  if (widths.size() == columns_.size()) return;
  std::string omitted = "not shown: ";
  for (std::size_t i = widths.size(); i < columns_.size(); ++i) {
    omitted += (i == widths.size() ? "" : ", ") + columns_[i].title;
  }
  out.write(out.faint(wrap(omitted + " (the terminal is too narrow)", out.columns())) + "\n");
}

}  // namespace tessera::cli
