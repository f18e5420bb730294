#pragma once
// Limits what few stored bytes may expand to. See SECURITY.md.

#include <cstdint>
#include <mutex>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/format/internal/repeated_parts.h"
#include "tessera/format/pickle_value.h"

namespace tessera::checkpoint {

// Law: what is made from bytes of a checkpoint takes at most a constant times these bytes, for example 512 bytes for a
// value of a pickle. Whatever takes more (gaps in lists, containers that occur several times, elements that are
// repeated) is charged to a budget of 64 MiB or 16 times the size of the files, whichever is larger.
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
  // `stored_bytes` is the size of all files.
  explicit StateBudgets(std::uint64_t stored_bytes) : leaves(stored_bytes), objects(stored_bytes) {}
  ExpansionBudget leaves;   // names and shapes that are repeated; see StateFlattener
  ExpansionBudget objects;  // what they share
};

// Law: of each object, what follows charges what a program may make of it beyond its bytes in the file, once and before
// anything makes it. So no command has to limit what it makes of all objects together. These functions throw
// Error(corrupt), without the place, if the budget does not allow it; then nothing is left of the budget.

// Charges an object for the parts that it shares with objects that were charged with `parts` before. Must be called
// before anything walks through it: for the objects of one pickle, when the checkpoint is opened.
void charge_shared(ExpansionBudget& budget, pickle::RepeatedParts& parts, pickle::NodeRef value);
// Charges an object for what it repeats within itself. Must be called before it is compared or becomes text, JSON or
// values: when it is loaded for any use. A checkpoint whose objects repeat too much for that can be opened, verified
// and converted to a pickle.
void charge_repeated(ExpansionBudget& budget, pickle::NodeRef value);

// Calls charge_repeated once for each object of a checkpoint. Thread-safe.
class RepeatedInObjects {
 public:
  // `stored_bytes` is the size of all files.
  RepeatedInObjects(std::size_t objects, std::uint64_t stored_bytes) : charged_(objects), budget_(stored_bytes) {}
  void charge(std::size_t i, pickle::NodeRef value);

 private:
  std::mutex mutex_;
  std::vector<bool> charged_;
  ExpansionBudget budget_;
};

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
