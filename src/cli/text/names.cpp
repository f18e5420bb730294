#include "cli/text/names.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <string_view>
#include <utility>

#include "cli/output.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/convert.h"

namespace tessera::cli {
namespace {

constexpr std::size_t kSuggestions = 3;

// The Levenshtein distance of a and b, at most `limit`.
std::size_t edit_distance(std::string_view a, std::string_view b, std::size_t limit) {
  if (std::max(a.size(), b.size()) - std::min(a.size(), b.size()) >= limit) return limit;
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    std::size_t best = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
      best = std::min(best, row[j]);
    }
    if (best >= limit) return limit;
  }
  return std::min(row.back(), limit);
}

// The distance of `name` from the name that was asked for, at most `limit`.
std::size_t remoteness(std::string_view wanted, std::string_view name, std::size_t limit) {
  if (wanted.size() >= 3 && name.find(wanted) != std::string_view::npos) return 1;
  return edit_distance(wanted, name, limit);
}

class Names {
 public:
  explicit Names(const checkpoint::Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (std::size_t i = 0; i < checkpoint_.tensors().size(); ++i) visit(checkpoint_.tensors()[i].name, i, true);
    for (std::size_t i = 0; i < checkpoint_.objects().size(); ++i) visit(checkpoint_.objects()[i].name, i, false);
  }

  std::string suggestion(std::string_view wanted) const {
    std::size_t below = 0;
    const std::string prefix = std::string(wanted) + ".";
    const std::size_t limit = std::max<std::size_t>(3, wanted.size() / 3);
    std::vector<std::pair<std::size_t, std::string_view>> close;
    for_each([&](const std::string& name, std::size_t, bool) {
      below += name.starts_with(prefix) ? 1 : 0;
      const std::size_t distance = remoteness(wanted, name, limit);
      if (distance < limit) close.emplace_back(distance, name);
    });
    if (below > 0) return fmt::format("; '{}*' has {}", printable(prefix), counted(below, "name"));
    std::partial_sort(close.begin(), close.begin() + std::min(kSuggestions, close.size()), close.end());
    close.resize(std::min(kSuggestions, close.size()));
    std::string text;
    for (const auto& [distance, name] : close) {
      text += fmt::format("{} '{}'", text.empty() ? "; did you mean" : ",", printable(name));
    }
    return text + (text.empty() ? "" : "?");
  }

 private:
  const checkpoint::Checkpoint& checkpoint_;
};

bool is_glob(std::string_view text) { return text.find_first_of("*?[") != std::string_view::npos; }

}  // namespace

NamedItems find_names(const checkpoint::Checkpoint& checkpoint, const std::vector<std::string>& names) {
  std::vector<bool> tensors(checkpoint.tensors().size(), names.empty());
  std::vector<bool> objects(checkpoint.objects().size(), names.empty());
  const Names all(checkpoint);
  for (const std::string& name : names) {
    bool found = false;
    if (const auto tensor = checkpoint.find_tensor(name)) {
      tensors[*tensor] = found = true;
    } else if (const auto object = checkpoint.find_object(name)) {
      objects[*object] = found = true;
    } else if (is_glob(name)) {
      all.for_each([&](const std::string& candidate, std::size_t i, bool is_tensor) {
        if (!checkpoint::glob_matches(name, candidate)) return;
        (is_tensor ? tensors : objects)[i] = found = true;
      });
      if (!found) {
        fail(ErrorCode::not_found, "{}: no name matches '{}'", checkpoint.path().string(), printable(name));
      }
    }
    if (!found) {
      fail(ErrorCode::not_found, "{}: no tensor or object is named '{}'{}", checkpoint.path().string(), printable(name),
           all.suggestion(name));
    }
  }
  NamedItems result;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i]) result.tensors.push_back(i);
  }
  for (std::size_t i = 0; i < objects.size(); ++i) {
    if (objects[i]) result.objects.push_back(i);
  }
  return result;
}

}  // namespace tessera::cli
