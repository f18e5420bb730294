// Evaluates the sizes that a rule states.

#include "checkpoint/map/rules.h"
#include "tessera/base/checked.h"
#include "tessera/base/error.h"
#include "tessera/layout/box.h"

namespace tessera::checkpoint {

std::int64_t MapStage::value(const Expression& expression, const std::vector<std::int64_t>* shape) const {
  return expression.value([&](std::string_view variable) -> std::optional<std::int64_t> {
    const auto found = parameters.find(std::string(variable));
    if (found != parameters.end()) return found->second;
    if (shape == nullptr || variable.size() < 2 || variable.size() > 3 || variable[0] != 'd') return std::nullopt;
    const auto digits = variable.substr(1);
    if (digits.find_first_not_of("0123456789") != std::string_view::npos) return std::nullopt;
    const auto d = static_cast<std::size_t>(std::stoul(std::string(digits)));
    return d < shape->size() ? std::optional((*shape)[d]) : std::nullopt;
  });
}

std::vector<std::int64_t> MapStage::sizes(const std::vector<Expression>& expressions, std::int64_t total,
                                          bool multiplies, const std::vector<std::int64_t>* shape) const {
  std::vector<std::int64_t> sizes;
  std::int64_t known = multiplies ? 1 : 0;
  std::optional<std::size_t> open;
  for (const Expression& expression : expressions) {
    sizes.push_back(value(expression, shape));
    if (sizes.back() == -1) {
      if (open) fail(ErrorCode::invalid_argument, "found -1 twice, expected at most one size to be left open");
      open = sizes.size() - 1;
    } else if (sizes.back() < 0) {
      fail(ErrorCode::invalid_argument, "'{}' is {}, expected a size", printable(expression.text()), sizes.back());
    } else {
      known = multiplies ? checked_multiply(known, sizes.back(), "the sizes")
                         : checked_add(known, sizes.back(), "the sizes");
    }
  }
  if (open && multiplies && known > 0 && total % known == 0) {
    sizes[*open] = total / known;
    known = total;
  } else if (open && !multiplies && known <= total) {
    sizes[*open] = total - known;
    known = total;
  }
  if (known != total || (open && sizes[*open] == -1)) {
    const std::string wanted = !open         ? fmt::to_string(total)
                               : !multiplies ? fmt::format("at most {}", total)
                               : known == 0  ? "a product above 0"
                                             : fmt::format("a divisor of {}", total);
    fail(ErrorCode::invalid_argument, "the sizes {} {} {}{}, expected {}", shape_to_string(sizes),
         multiplies ? "multiply to" : "add up to", known, open ? " without the -1" : "", wanted);
  }
  return sizes;
}

}  // namespace tessera::checkpoint
