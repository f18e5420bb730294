#include <algorithm>

#include "tessera/checkpoint/convert.h"

namespace tessera::checkpoint {
namespace {

// Matches one character against the set whose first character, after '[', is glob[at]. Returns the position after ']'
// and whether the character is in the set; npos if there is no ']', in which case '[' matches itself.
std::pair<std::size_t, bool> match_set(std::string_view glob, std::size_t at, char c) {
  const bool negated = at < glob.size() && (glob[at] == '!' || glob[at] == '^');
  if (negated) ++at;
  bool found = false;
  for (bool first = true; at < glob.size() && (first || glob[at] != ']'); first = false) {
    const auto low = static_cast<unsigned char>(glob[at++]);
    auto high = low;
    if (at + 1 < glob.size() && glob[at] == '-' && glob[at + 1] != ']') {
      high = static_cast<unsigned char>(glob[at + 1]);
      at += 2;
    }
    found = found || (low <= static_cast<unsigned char>(c) && static_cast<unsigned char>(c) <= high);
  }
  if (at >= glob.size()) return {std::string_view::npos, false};
  return {at + 1, found != negated};
}

}  // namespace

bool glob_matches(std::string_view glob, std::string_view text) {
  std::size_t g = 0, t = 0;
  std::size_t star = std::string_view::npos, star_text = 0;  // the last '*' and the end of the text it matches
  while (t < text.size()) {
    if (g < glob.size() && glob[g] == '*') {
      star = g++;
      star_text = t;
      continue;
    }
    bool matched = false;
    std::size_t next = g + 1;
    if (g < glob.size()) {
      if (glob[g] == '[') {
        const auto [after_set, in_set] = match_set(glob, g + 1, text[t]);
        matched = after_set == std::string_view::npos ? text[t] == '[' : in_set;
        if (after_set != std::string_view::npos) next = after_set;
      } else {
        matched = glob[g] == '?' || glob[g] == text[t];
      }
    }
    if (matched) {
      g = next;
      ++t;
    } else if (star != std::string_view::npos) {
      g = star + 1;
      t = ++star_text;
    } else {
      return false;
    }
  }
  while (g < glob.size() && glob[g] == '*') ++g;
  return g == glob.size();
}

bool Selection::takes(std::string_view name) const {
  const auto matches = [&](const std::string& glob) { return glob_matches(glob, name); };
  return (select.empty() || std::any_of(select.begin(), select.end(), matches)) &&
         std::none_of(exclude.begin(), exclude.end(), matches);
}

void check_selection(const Selection& selection, const std::vector<const Checkpoint*>& checkpoints) {
  if (selection.select.empty() && selection.exclude.empty()) return;
  std::vector<bool> matched(selection.select.size(), false);
  std::size_t names = 0;
  bool any_selected = false;
  const auto visit = [&](std::string_view name) {
    ++names;
    any_selected = any_selected || selection.takes(name);
    for (std::size_t i = 0; i < matched.size(); ++i) {
      if (!matched[i]) matched[i] = glob_matches(selection.select[i], name);
    }
  };
  for (const Checkpoint* checkpoint : checkpoints) {
    for (const auto& tensor : checkpoint->tensors()) visit(tensor.name);
    for (const auto& object : checkpoint->objects()) visit(object.name);
  }
  for (std::size_t i = 0; i < matched.size(); ++i) {
    if (!matched[i]) {
      fail(ErrorCode::invalid_argument, "select: no name matches '{}', expected a match among {} names",
           printable(selection.select[i]), names);
    }
  }
  if (names > 0 && !any_selected) {
    fail(ErrorCode::invalid_argument, "select and exclude leave nothing, expected at least one of {} names", names);
  }
}

}  // namespace tessera::checkpoint
