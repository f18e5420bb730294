#pragma once
// Integer expressions of a map's shapes and sizes, such as "heads / kv_heads + 2".

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/function_ref.h"

namespace tessera::checkpoint {

// Numbers, names, + - * / and parentheses, with the usual precedence. A division must have no remainder.
class Expression {
 public:
  explicit Expression(std::int64_t number);
  // Throws Error(invalid_argument) if `text` is too long. Whether it is an expression shows with its value.
  explicit Expression(std::string_view text);

  // Returns the value. `value_of` returns nothing for a name that it does not know. Throws Error(invalid_argument) for
  // such a name, a text that is not an expression, a remainder, a division by 0 and an overflow.
  using Names = FunctionRef<std::optional<std::int64_t>(std::string_view name)>;
  std::int64_t value(Names value_of) const;

  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace tessera::checkpoint
