// Patterns of a build without RE2: there are none.

#include "checkpoint/map/pattern.h"
#include "tessera/base/error.h"

namespace tessera::checkpoint {

struct Pattern::Compiled {};

Pattern::Pattern(std::string text) : text_(std::move(text)) {
  fail(ErrorCode::unsupported, "the pattern '{}' needs regular expressions, and this tessera was built without RE2",
       printable(text_));
}
std::size_t Pattern::groups() const { return 0; }
std::optional<std::vector<std::string>> Pattern::match(const std::string& /*name*/) const { return std::nullopt; }
std::optional<std::string> Pattern::replace(const std::string& /*name*/, const std::string& /*replacement*/,
                                            bool /*all*/) const {
  return std::nullopt;
}
void Pattern::check_replacement(const std::string& /*replacement*/) const {}

}  // namespace tessera::checkpoint
