#include "cli/text/similar_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "tessera/base/error.h"

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

}  // namespace

SimilarNames::SimilarNames(std::string_view wanted)
    : wanted_(wanted), limit_(std::max<std::size_t>(3, wanted.size() / 3)) {}

void SimilarNames::add(std::string_view name) {
  const std::size_t distance = remoteness(wanted_, name, limit_);
  if (distance < limit_) close_.emplace_back(distance, name);
}

std::string SimilarNames::suggestion() {
  const std::size_t count = std::min(kSuggestions, close_.size());
  std::partial_sort(close_.begin(), close_.begin() + static_cast<std::ptrdiff_t>(count), close_.end());
  std::string text;
  for (std::size_t i = 0; i < count; ++i) {
    text += fmt::format("{} '{}'", text.empty() ? "; did you mean" : ",", printable(close_[i].second));
  }
  return text + (text.empty() ? "" : "?");
}

}  // namespace tessera::cli
