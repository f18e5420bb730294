#pragma once
// Limits what few stored bytes may expand to. See SECURITY.md.

#include <cstdint>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/format/internal/repeated_parts.h"

namespace tessera::checkpoint {

// Law: whatever is made from a checkpoint beyond the bytes that it stores (gaps in lists, containers that occur several
// times, elements that are repeated) is charged to a budget of 64 MiB or 16 times the size of its files, whichever is
// larger.
class ExpansionBudget {
 public:
  static constexpr std::uint64_t kLeastBytes = std::uint64_t{64} << 20;
  static constexpr std::uint64_t kTimesStored = 16;

  // `own_bytes` can be charged beyond the limit, for example what is stored if that is charged too.
  explicit ExpansionBudget(std::uint64_t stored_bytes, std::uint64_t own_bytes = 0);

  std::uint64_t limit_bytes() const { return limit_bytes_; }
  std::uint64_t left_bytes() const { return left_bytes_; }
  // Returns false, and charges nothing, if less than `bytes` are left.
  bool charge(std::uint64_t bytes);

 private:
  std::uint64_t limit_bytes_, left_bytes_;
};

// The budgets of a checkpoint whose files are pickles of states: all files share them.
struct StateBudgets {
  // The leaves of a small file take more than 16 times its size, even if nothing is repeated.
  static constexpr std::uint64_t kLeafBytesPerFile = 256 << 10;

  // `stored_bytes` is the size of all `files` files.
  StateBudgets(std::uint64_t stored_bytes, std::uint64_t files)
      : leaves(stored_bytes, files * kLeafBytesPerFile), objects(stored_bytes) {}
  ExpansionBudget leaves;   // their names and shapes; see StateFlattener
  ExpansionBudget objects;  // what they share
};

// Charges an object for the parts that it shares with objects that were counted with `parts` before, and within itself.
// Law: whoever makes an object of a pickle calls this once for it, before anything walks through it. So no command has
// to limit what it makes of all objects together. Throws Error(corrupt), without the place, if the budget does not
// allow it; then nothing is left of the budget.
void charge_object(ExpansionBudget& budget, pickle::RepeatedParts& parts, pickle::NodeRef value);

// Returns the size of all files.
std::uint64_t stored_bytes(const std::vector<SourceFile>& files);

// Throws Error(unsupported), naming the largest of them, if the elements of the selected tensors exceed the size of the
// files by more than the budget.
void check_expansion(const Checkpoint& checkpoint, const Selection& selection);
// The same for tensors that are listed by index.
void check_expansion(const Checkpoint& checkpoint, const std::vector<std::size_t>& tensors);
// The same for `bytes` of elements, most of them of `largest`.
void check_expansion(const Checkpoint& checkpoint, std::uint64_t bytes, const TensorInfo& largest);

}  // namespace tessera::checkpoint
