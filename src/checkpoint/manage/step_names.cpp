#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>

#include "tessera/base/error.h"
#include "tessera/checkpoint/internal/checkpoint_files.h"
#include "tessera/checkpoint/manage/run_directory.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kUnit = "step";
// Words in front of a number, which '-', '_' or nothing separates, and their units.
constexpr std::array<std::pair<std::string_view, std::string_view>, 8> kWords = {{{"step", kUnit},
                                                                                  {"checkpoint", "checkpoint"},
                                                                                  {"ckpt", "checkpoint"},
                                                                                  {"iteration", "iter"},
                                                                                  {"iter", "iter"},
                                                                                  {"global_step", "global_step"},
                                                                                  {"globalstep", "global_step"},
                                                                                  {"epoch", "epoch"}}};
constexpr std::size_t kMaxDigits = 18;  // within 63 bits

std::optional<std::int64_t> number_of(std::string_view text) {
  const bool is_number = !text.empty() && text.size() <= kMaxDigits &&
                         std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
  if (!is_number) return std::nullopt;
  std::int64_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

// "epoch=3-step=100-val_loss=0.25"
std::optional<StepName> parse_pairs(std::string_view text) {
  std::optional<StepName> found;
  while (!text.empty()) {
    const std::string_view pair = text.substr(0, text.find('-'));
    text.remove_prefix(std::min(text.size(), pair.size() + 1));
    const std::string_view key = pair.substr(0, pair.find('='));
    const auto number = number_of(pair.substr(std::min(pair.size(), key.size() + 1)));
    if (number && (key == kUnit || (key == "epoch" && !found))) found = StepName{*number, std::string(key)};
  }
  return found;
}

}  // namespace

std::string step_name(std::int64_t step) { return fmt::format("{}-{}", kUnit, step); }

std::optional<StepName> parse_step_name(std::string_view name) {
  const std::string_view text = name.substr(0, name.size() - checkpoint_file_ending(name).size());
  if (text.find('=') != std::string_view::npos) return parse_pairs(text);
  for (const auto& [word, unit] : kWords) {
    if (!text.starts_with(word)) continue;
    std::string_view rest = text.substr(word.size());
    if (rest.starts_with('-') || rest.starts_with('_')) rest.remove_prefix(1);
    if (const auto number = number_of(rest)) return StepName{*number, std::string(unit)};
  }
  if (const auto number = number_of(text)) return StepName{*number, ""};
  return std::nullopt;
}

std::vector<NamedStep> find_steps(const fs::path& directory) {
  std::vector<NamedStep> found;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    std::string name = it->path().filename().string();
    const auto of = parse_step_name(name);
    if (!of) continue;
    std::error_code ignored;
    const bool is_file = !checkpoint_file_ending(name).empty() && it->is_regular_file(ignored);
    if (is_file || it->is_directory(ignored)) found.push_back({std::move(name), *of});
  }
  if (error && error != std::errc::no_such_file_or_directory && error != std::errc::not_a_directory) {
    fail(ErrorCode::io, "list {}: {}", directory.string(), error.message());
  }
  std::ranges::sort(found, [](const NamedStep& a, const NamedStep& b) {
    return std::tie(a.of.step, a.name) < std::tie(b.of.step, b.name);
  });
  return found;
}

}  // namespace tessera::checkpoint
