#include "checkpoint/map/expression.h"

#include <charconv>

#include "tessera/base/error.h"

namespace tessera::checkpoint {
namespace {

constexpr std::size_t kMaxLength = 1000;
constexpr int kMaxNesting = 50;

bool is_name_start(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Evaluates an expression while it parses it.
class Evaluation {
 public:
  Evaluation(std::string_view text, Expression::Names value_of) : text_(text), value_of_(value_of) {}

  std::int64_t run() {
    const std::int64_t value = sum(0);
    if (at_ < text_.size()) unexpected("an operator or the end");
    return value;
  }

 private:
  [[noreturn]] void unexpected(std::string_view expected) const {
    fail(ErrorCode::invalid_argument, "'{}' is not an expression: found {} at character {}, expected {}",
         printable(text_), at_ < text_.size() ? fmt::format("'{}'", printable(text_.substr(at_, 1))) : "the end",
         at_ + 1, expected);
  }

  [[noreturn]] void overflows() const {
    fail(ErrorCode::invalid_argument, "'{}' overflows, expected numbers of 64 bits", printable(text_));
  }

  char next() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  template <typename Operation>
  std::int64_t checked(std::int64_t a, std::int64_t b, const Operation& operation) const {
    std::int64_t result = 0;
    if (operation(a, b, &result)) overflows();
    return result;
  }

  std::int64_t sum(int nesting) {
    std::int64_t value = product(nesting);
    for (char c = next(); c == '+' || c == '-'; c = next()) {
      ++at_;
      const std::int64_t other = product(nesting);
      value = c == '+' ? checked(value, other, [](auto a, auto b, auto* r) { return __builtin_add_overflow(a, b, r); })
                       : checked(value, other, [](auto a, auto b, auto* r) { return __builtin_sub_overflow(a, b, r); });
    }
    return value;
  }

  std::int64_t product(int nesting) {
    std::int64_t value = factor(nesting);
    for (char c = next(); c == '*' || c == '/'; c = next()) {
      ++at_;
      const std::int64_t other = factor(nesting);
      if (c == '*') {
        value = checked(value, other, [](auto a, auto b, auto* r) { return __builtin_mul_overflow(a, b, r); });
        continue;
      }
      // The one overflow of a division is that of the least number by -1.
      if (other == -1) {
        value = checked(0, value, [](auto a, auto b, auto* r) { return __builtin_sub_overflow(a, b, r); });
        continue;
      }
      if (other == 0 || value % other != 0) {
        fail(ErrorCode::invalid_argument, "'{}': {} is not divisible by {}, expected a division without remainder",
             printable(text_), value, other);
      }
      value /= other;
    }
    return value;
  }

  std::int64_t factor(int nesting) {
    if (nesting > kMaxNesting) unexpected(fmt::format("at most {} parentheses", kMaxNesting));
    const char c = next();
    if (c == '(') {
      ++at_;
      const std::int64_t value = sum(nesting + 1);
      if (next() != ')') unexpected("')'");
      ++at_;
      return value;
    }
    if (is_digit(c) || (c == '-' && at_ + 1 < text_.size() && is_digit(text_[at_ + 1]))) return number();
    if (!is_name_start(c)) unexpected("a number, a name or '('");
    const std::size_t begin = at_;
    while (at_ < text_.size() && (is_name_start(text_[at_]) || is_digit(text_[at_]))) ++at_;
    const std::string_view name = text_.substr(begin, at_ - begin);
    if (const auto value = value_of_(name)) return *value;
    fail(ErrorCode::invalid_argument, "'{}': there is no parameter '{}', expected one that the map declares",
         printable(text_), printable(name));
  }

  std::int64_t number() {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
    if (error != std::errc()) overflows();
    at_ = static_cast<std::size_t>(end - text_.data());
    return value;
  }

  std::string_view text_;
  Expression::Names value_of_;
  std::size_t at_ = 0;
};

}  // namespace

Expression::Expression(std::int64_t number) : text_(std::to_string(number)) {}

Expression::Expression(std::string_view text) : text_(text) {
  if (text.size() > kMaxLength) {
    fail(ErrorCode::invalid_argument, "an expression of {} characters, expected at most {}", text.size(), kMaxLength);
  }
}

std::int64_t Expression::value(Names value_of) const { return Evaluation(text_, value_of).run(); }

}  // namespace tessera::checkpoint
