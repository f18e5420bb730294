// Patterns by RE2.

#include <re2/re2.h>

#include "checkpoint/map/pattern.h"
#include "tessera/base/error.h"

namespace tessera::checkpoint {
namespace {

constexpr std::size_t kMaxPatternBytes = 10'000;
constexpr int kMaxGroups = 9;  // as \1 to \9 name them

re2::RE2::Options options_of_patterns() {
  re2::RE2::Options options;
  options.set_log_errors(false);
  return options;
}

}  // namespace

struct Pattern::Compiled {
  explicit Compiled(const std::string& text) : expression(text, options_of_patterns()) {}
  re2::RE2 expression;
};

Pattern::Pattern(std::string text) : text_(std::move(text)) {
  if (text_.size() > kMaxPatternBytes) {
    fail(ErrorCode::invalid_argument, "a pattern of {} bytes, expected at most {}", text_.size(), kMaxPatternBytes);
  }
  compiled_ = std::make_shared<const Compiled>(text_);
  const re2::RE2& expression = compiled_->expression;
  if (!expression.ok()) {
    fail(ErrorCode::invalid_argument, "'{}' is not a regular expression, expected the syntax of RE2: {}",
         printable(text_), printable(expression.error()));
  }
  if (expression.NumberOfCapturingGroups() > kMaxGroups) {
    fail(ErrorCode::invalid_argument, "'{}' has {} groups that capture, expected at most {}; (?:...) does not capture",
         printable(text_), expression.NumberOfCapturingGroups(), kMaxGroups);
  }
}

std::size_t Pattern::groups() const {
  return static_cast<std::size_t>(compiled_->expression.NumberOfCapturingGroups());
}

std::optional<std::vector<std::string>> Pattern::match(const std::string& name) const {
  std::vector<std::string> found(groups());
  std::vector<re2::RE2::Arg> arguments;
  std::vector<const re2::RE2::Arg*> pointers;
  arguments.reserve(found.size());
  pointers.reserve(found.size());
  for (std::string& one : found) pointers.push_back(&arguments.emplace_back(&one));
  if (!re2::RE2::FullMatchN(name, compiled_->expression, pointers.data(), static_cast<int>(pointers.size()))) {
    return std::nullopt;
  }
  return found;
}

std::optional<std::string> Pattern::replace(const std::string& name, const std::string& replacement, bool all) const {
  std::string result = name;
  const bool found = all ? re2::RE2::GlobalReplace(&result, compiled_->expression, replacement) > 0
                         : re2::RE2::Replace(&result, compiled_->expression, replacement);
  return found ? std::optional(std::move(result)) : std::nullopt;
}

void Pattern::check_replacement(const std::string& replacement) const {
  std::string problem;
  if (compiled_->expression.CheckRewriteString(replacement, &problem)) return;
  fail(ErrorCode::invalid_argument, "'{}' does not fit to the pattern '{}', expected only its groups: {}",
       printable(replacement), printable(text_), printable(problem));
}

}  // namespace tessera::checkpoint
