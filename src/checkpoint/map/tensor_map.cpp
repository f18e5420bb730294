#include "tessera/checkpoint/tensor_map.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "checkpoint/map/rules.h"
#include "tessera/base/error.h"
#include "tessera/base/file.h"

namespace tessera::checkpoint {
namespace {

constexpr std::size_t kShownProblems = 10;

std::string joined(const std::vector<std::string>& problems) {
  std::string text;
  for (std::size_t i = 0; i < std::min(problems.size(), kShownProblems); ++i) {
    text += (i == 0 ? "" : "; ") + problems[i];
  }
  if (problems.size() > kShownProblems) text += fmt::format("; and {} more", problems.size() - kShownProblems);
  return text;
}

}  // namespace

TensorMap::TensorMap() : stages_(std::make_shared<const Stages>()) {}
TensorMap::TensorMap(std::shared_ptr<const Stages> stages) : stages_(std::move(stages)) {}

TensorMap TensorMap::parse(std::string_view json, const std::string& name, const Parameters& set,
                           std::string_view config) {
  return TensorMap(std::make_shared<const Stages>(Stages{{parse_map_stage(json, name, set, config)}}));
}

TensorMap TensorMap::read(const std::string& file_or_name, const Parameters& set, std::string_view config) {
  if (const auto text = shipped_map(file_or_name)) return parse(*text, file_or_name, set, config);
  std::error_code error;
  if (std::filesystem::status(file_or_name, error).type() == std::filesystem::file_type::not_found) {
    std::string names;
    for (const std::string& name : shipped_maps()) names += (names.empty() ? "" : ", ") + name;
    fail(ErrorCode::not_found, "'{}': no such file, expected a file or one of tessera's maps, which are {}",
         printable(file_or_name), names);
  }
  if (error) fail(ErrorCode::io, "open {}: {}", printable(file_or_name), error.message());
  const Bytes text = read_file(file_or_name, kMaxBytes);
  return parse(as_text(text), file_or_name, set, config);
}

TensorMap TensorMap::substitution(std::string_view text) {
  const auto where = [&] { return fmt::format("'{}'", printable(text)); };
  const char delimiter = text.size() > 1 ? text[1] : '\0';
  if (text.empty() || text[0] != 's' || delimiter == '\0' || delimiter == '\\') {
    fail(ErrorCode::invalid_argument, "{} is not a substitution, expected s/PATTERN/REPLACEMENT/", where());
  }
  // A delimiter after a backslash is a character of its part.
  std::vector<std::string> parts(1);
  for (std::size_t i = 2; i < text.size(); ++i) {
    if (text[i] == delimiter) {
      parts.emplace_back();
    } else if (text[i] == '\\' && i + 1 < text.size()) {
      if (text[i + 1] != delimiter) parts.back() += text[i];
      parts.back() += text[++i];
    } else {
      parts.back() += text[i];
    }
  }
  if (parts.size() != 3 || (!parts[2].empty() && parts[2] != "g")) {
    fail(ErrorCode::invalid_argument,
         "{} is not a substitution, expected s{}PATTERN{}REPLACEMENT{} and at most the flag g", where(), delimiter,
         delimiter, delimiter);
  }
  const std::string name(text);
  return TensorMap(std::make_shared<const Stages>(Stages{{with_context(
      where, [&] { return substitution_stage(printable(name), parts[0], parts[1], parts[2] == "g"); })}}));
}

TensorMap TensorMap::then(const TensorMap& next) const {
  Stages stages = *stages_;
  stages.stages.insert(stages.stages.end(), next.stages_->stages.begin(), next.stages_->stages.end());
  return TensorMap(std::make_shared<const Stages>(std::move(stages)));
}

TensorMap TensorMap::inverse() const {
  Stages inverse;
  std::vector<std::string> problems;
  for (auto stage = stages_->stages.rbegin(); stage != stages_->stages.rend(); ++stage) {
    inverse.stages.push_back(inverse_stage(*stage, problems));
  }
  if (!problems.empty()) fail(ErrorCode::invalid_argument, "{}", joined(problems));
  return TensorMap(std::make_shared<const Stages>(std::move(inverse)));
}

std::vector<std::string> TensorMap::check(const std::shared_ptr<const Checkpoint>& checkpoint) const {
  return apply_stages(stages_->stages, checkpoint).problems;
}

std::shared_ptr<const Checkpoint> TensorMap::apply(const std::shared_ptr<const Checkpoint>& checkpoint) const {
  MapResult result = apply_stages(stages_->stages, checkpoint);
  if (!result.problems.empty()) {
    fail(ErrorCode::invalid_argument, "map {}: {}", checkpoint->path().string(), joined(result.problems));
  }
  return std::move(result.view);
}

}  // namespace tessera::checkpoint
