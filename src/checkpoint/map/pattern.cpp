#include "checkpoint/map/pattern.h"

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::checkpoint {
namespace {

bool is_letter_or_digit(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9'); }

// Returns the position after the group that begins at `open`, or nothing if it has a group or does not capture.
std::optional<std::size_t> end_of_group(const std::string& pattern, std::size_t open) {
  if (open + 1 < pattern.size() && pattern[open + 1] == '?') return std::nullopt;
  bool in_set = false;
  for (std::size_t i = open + 1; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\') {
      ++i;
    } else if (in_set) {
      in_set = c != ']';
    } else if (c == '[') {
      in_set = true;
      if (i + 1 < pattern.size() && pattern[i + 1] == '^') ++i;
      if (i + 1 < pattern.size() && pattern[i + 1] == ']') ++i;
    } else if (c == '(') {
      return std::nullopt;
    } else if (c == ')') {
      return i + 1;
    }
  }
  return std::nullopt;
}

void append_literal(PlainPattern& plain, char c) {
  if (plain.parts.empty() || plain.parts.back().is_group) plain.parts.emplace_back();
  plain.parts.back().text += c;
}

}  // namespace

NameTemplate::NameTemplate(std::string text, std::size_t groups, bool has_index) : text_(std::move(text)) {
  const auto literal = [&](char c) {
    if (parts_.empty() || parts_.back().group != Part::kLiteral) parts_.emplace_back();
    parts_.back().literal += c;
  };
  std::size_t indices = 0;
  for (std::size_t i = 0; i < text_.size(); ++i) {
    if (text_.compare(i, 3, "{i}") == 0) {
      parts_.push_back({Part::kIndex, {}});
      ++indices;
      i += 2;
      continue;
    }
    if (text_[i] != '\\') {
      literal(text_[i]);
      continue;
    }
    const char next = ++i < text_.size() ? text_[i] : '\0';
    if (next == '\\') {
      literal('\\');
    } else if (next >= '1' && next <= '9') {
      const auto group = static_cast<std::size_t>(next - '0');
      if (group > groups) {
        fail(ErrorCode::invalid_argument, "'{}' has \\{}, expected groups up to \\{}, which the pattern has",
             printable(text_), group, groups);
      }
      parts_.push_back({group, {}});
    } else {
      fail(ErrorCode::invalid_argument, "'{}' has '\\{}', expected \\1 to \\9 or \\\\", printable(text_),
           next == '\0' ? "" : printable(std::string_view(&next, 1)));
    }
  }
  if (indices != (has_index ? 1U : 0U)) {
    fail(ErrorCode::invalid_argument, "'{}' has {{i}} {} times, expected {}", printable(text_), indices,
         has_index ? "once" : "none: only unstack has an index");
  }
}

std::string NameTemplate::name(const std::vector<std::string>& groups, std::size_t index) const {
  std::string result;
  for (const Part& part : parts_) {
    if (part.group == Part::kLiteral) {
      result += part.literal;
    } else if (part.group == Part::kIndex) {
      result += std::to_string(index);
    } else {
      result += groups.at(part.group - 1);
    }
  }
  return result;
}

std::optional<PlainPattern> as_plain(const std::string& pattern) {
  PlainPattern plain;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '(') {
      const auto end = end_of_group(pattern, i);
      if (!end) return std::nullopt;
      plain.parts.push_back({true, pattern.substr(i + 1, *end - i - 2)});
      i = *end - 1;
    } else if (c == '\\') {
      if (++i >= pattern.size() || is_letter_or_digit(pattern[i])) return std::nullopt;
      append_literal(plain, pattern[i]);
    } else if ((c == '^' && i == 0) || (c == '$' && i + 1 == pattern.size())) {
      continue;  // all of a name is matched anyway
    } else if (std::string_view(".*+?[]{}|^$)").find(c) != std::string_view::npos) {
      return std::nullopt;
    } else {
      append_literal(plain, c);
    }
  }
  return plain;
}

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (!is_letter_or_digit(c) && c != '_' && static_cast<unsigned char>(c) < 0x80) result += '\\';
    result += c;
  }
  return result;
}

InverseName inverse_name(const std::string& pattern, const NameTemplate& to, std::size_t index) {
  const std::optional<PlainPattern> plain = as_plain(pattern);
  if (!plain) {
    fail(ErrorCode::invalid_argument, "its pattern is '{}', expected text with groups that capture, and nothing else",
         printable(pattern));
  }
  std::vector<std::string> groups;
  for (const PlainPattern::Part& part : plain->parts) {
    if (part.is_group) groups.push_back(part.text);
  }
  InverseName inverse;
  std::vector<std::size_t> number_of(groups.size() + 1, 0);  // in the inverse
  for (const NameTemplate::Part& part : to.parts()) {
    if (part.group == NameTemplate::Part::kLiteral) {
      inverse.match += escaped(part.literal);
      continue;
    }
    const bool is_index = part.group == NameTemplate::Part::kIndex;
    inverse.order.push_back(is_index ? 0 : part.group);
    if (is_index) {
      inverse.index_group = inverse.order.size();
      inverse.match += "(\\d+)";
      continue;
    }
    if (number_of[part.group] != 0 || part.group == index) {
      fail(ErrorCode::invalid_argument, "'{}' has \\{} {}, expected it {}", printable(to.text()), part.group,
           part.group == index ? "too" : "twice", part.group == index ? "not to have the index" : "once");
    }
    number_of[part.group] = inverse.order.size();
    inverse.match += "(" + groups[part.group - 1] + ")";
  }
  std::size_t group = 0;
  for (const PlainPattern::Part& part : plain->parts) {
    if (!part.is_group) {
      for (const char c : part.text) inverse.to += c == '\\' ? std::string("\\\\") : std::string(1, c);
      continue;
    }
    if (++group == index) {
      inverse.to += "{i}";
    } else if (number_of[group] == 0) {
      fail(ErrorCode::invalid_argument, "'{}' does not have \\{}, expected each group of the pattern",
           printable(to.text()), group);
    } else {
      inverse.to += "\\" + std::to_string(number_of[group]);
    }
  }
  return inverse;
}

}  // namespace tessera::checkpoint
