#pragma once
// Patterns of names, and templates of new names.

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::checkpoint {

// A regular expression in RE2's syntax, which takes linear time to match. Cheap to copy.
class Pattern {
 public:
  // Throws Error(invalid_argument) if `text` is not a regular expression, and Error(unsupported) without RE2.
  explicit Pattern(std::string text);

  const std::string& text() const { return text_; }
  std::size_t groups() const;  // that capture

  // Returns the text of each group, if the pattern matches all of `name`; empty for a group that took no part.
  std::optional<std::vector<std::string>> match(const std::string& name) const;
  // Returns `name` with what the pattern matches replaced by `replacement`, in which \0 to \9 are what matched: the
  // first place, or all. Nothing if the pattern matches nowhere.
  std::optional<std::string> replace(const std::string& name, const std::string& replacement, bool all) const;
  // Throws Error(invalid_argument) unless `replacement` names only groups of the pattern.
  void check_replacement(const std::string& replacement) const;

 private:
  struct Compiled;
  std::string text_;
  std::shared_ptr<const Compiled> compiled_;
};

// A new name: text, groups of a pattern as \1 to \9, and at most one index as {i}. A backslash is written as two.
class NameTemplate {
 public:
  // Throws Error(invalid_argument) for another character after a backslash, for a group beyond `groups`, and unless
  // there is one index if `has_index`, and none otherwise.
  NameTemplate(std::string text, std::size_t groups, bool has_index);

  const std::string& text() const { return text_; }
  std::string name(const std::vector<std::string>& groups, std::size_t index = 0) const;

  // Literal text, a group (from 1), or the index (kIndex).
  struct Part {
    static constexpr std::size_t kLiteral = 0, kIndex = SIZE_MAX;
    std::size_t group = kLiteral;
    std::string literal;
  };
  const std::vector<Part>& parts() const { return parts_; }

 private:
  std::string text_;
  std::vector<Part> parts_;
};

// A pattern that is text with groups in it: "a\.(\d+)\.b" has the literals "a.", ".b" and the group "\d+".
struct PlainPattern {
  struct Part {
    bool is_group = false;
    std::string text;  // of a group: its expression
  };
  std::vector<Part> parts;
};
// Returns the parts of a pattern, or nothing if it has anything but text and capturing groups without further ones.
std::optional<PlainPattern> as_plain(const std::string& pattern);

// The inverse of a pattern and a template: a pattern for the names that the template makes, and the template that makes
// the names that the pattern matches.
struct InverseName {
  std::string match, to;
  std::vector<std::size_t> order;  // the groups of `match` as groups of the original pattern; 0 for the index
  std::size_t index_group = 0;     // the group of `match` that is the index of the original template; 0 if it has none
};
// Group `index` of `pattern`, if it is not 0, becomes the index of the inverse's template. Throws
// Error(invalid_argument) unless `pattern` is text with groups, and `to` has each of the others once.
InverseName inverse_name(const std::string& pattern, const NameTemplate& to, std::size_t index = 0);

// Returns a pattern that matches this text alone.
std::string escaped(std::string_view text);

}  // namespace tessera::checkpoint
