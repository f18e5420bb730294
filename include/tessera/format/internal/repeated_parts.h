#pragma once
// Counts what the values of a tree share: a pickle can define a part once and refer to it often.

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <unordered_map>

#include "tessera/base/internal/text_hash.h"
#include "tessera/format/pickle_value.h"

namespace tessera::pickle {

// Counts values of trees that all live as long as this, one after the other. A program that makes something of each of
// them (text, JSON, an archive) has limits for each value alone; this is for a limit on all of them.
//
// Law: what a program makes of the values takes at most
//   9 * (the size of their pickles + the sum of count()) + the sum of within()
// where a value takes 16 bytes, and text of more than 64 bytes its length. Short text is not counted: its bytes amount
// to little more than the reference in the pickle.
class RepeatedParts {
 public:
  // Counts the parts that values before had too, each once. Stops when the count is above `limit_bytes`. Takes a time
  // in proportion to the parts that no value before had, and to the result.
  std::uint64_t count(NodeRef value, std::uint64_t limit_bytes);
  // Counts the parts that `repr` and JSON repeat within a value, beyond eight times of what it has once. If they refuse
  // the value, they do so after that many. Takes a time in proportion to the parts that it has once, and to the result.
  static std::uint64_t within(NodeRef value);

 private:
  void visit(NodeRef value, std::size_t depth);
  bool enter(std::uint64_t identity, std::uint64_t& new_amount, std::uint64_t amount, std::uint64_t bytes);
  void visit_text(std::string_view text);
  std::uint64_t count_printed(NodeRef value) const;

  std::unordered_map<std::uint64_t, std::uint64_t, NumberHash> seen_;  // container or address of text -> last value
  std::uint64_t value_ = 0;                                            // the number of the current one
  // Of the current value.
  std::uint64_t limit_bytes_ = 0, repeated_bytes_ = 0;
  std::uint64_t new_values_ = 0, new_text_bytes_ = 0;
  bool has_shared_parts_ = false;
};

}  // namespace tessera::pickle
