#include "checkpoint/source/expansion.h"

#include <algorithm>

#include "tessera/base/bytes.h"
#include "tessera/base/error.h"

namespace tessera::checkpoint {
namespace {

void charge_parts(ExpansionBudget& budget, std::uint64_t bytes) {
  if (budget.charge(bytes)) return;
  budget.charge(budget.left_bytes());
  fail(ErrorCode::corrupt,
       "the parts that objects share stand for more than {}, expected at most 64 MiB or 16 times the files",
       format_bytes(budget.limit_bytes()));
}

}  // namespace

ExpansionBudget::ExpansionBudget(std::uint64_t stored_bytes, std::uint64_t own_bytes)
    : limit_bytes_(
          std::max(kLeastBytes, stored_bytes > UINT64_MAX / kTimesStored ? UINT64_MAX : stored_bytes * kTimesStored)),
      left_bytes_(own_bytes > UINT64_MAX - limit_bytes_ ? UINT64_MAX : limit_bytes_ + own_bytes) {}

bool ExpansionBudget::charge(std::uint64_t bytes) {
  if (bytes > left_bytes_) return false;
  left_bytes_ -= bytes;
  return true;
}

void charge_shared(ExpansionBudget& budget, pickle::RepeatedParts& parts, pickle::NodeRef value) {
  charge_parts(budget, parts.count(value, budget.left_bytes()));
}

void charge_repeated(ExpansionBudget& budget, pickle::NodeRef value) {
  charge_parts(budget, pickle::RepeatedParts::within(value));
}

void RepeatedInObjects::charge(std::size_t i, pickle::NodeRef value) {
  const std::lock_guard lock(mutex_);
  if (!charged_[i]) charge_repeated(budget_, value);
  charged_[i] = true;
}

std::uint64_t stored_bytes(const std::vector<SourceFile>& files) {
  std::uint64_t total = 0;
  for (const SourceFile& file : files) total += file.size_bytes.value_or(0);
  return total;
}

void check_expansion(const Checkpoint& checkpoint, const Selection& selection) {
  std::vector<std::size_t> tensors;
  for (std::size_t i = 0; i < checkpoint.tensors().size(); ++i) {
    if (selection.takes(checkpoint.tensors()[i].name)) tensors.push_back(i);
  }
  check_expansion(checkpoint, tensors);
}

void check_expansion(const Checkpoint& checkpoint, const std::vector<std::size_t>& tensors) {
  const TensorInfo* largest = nullptr;
  std::uint64_t total = 0;
  for (const std::size_t i : tensors) {
    const TensorInfo& tensor = checkpoint.tensors()[i];
    const std::uint64_t bytes = tensor.size_bytes();
    if (largest == nullptr || bytes > largest->size_bytes()) largest = &tensor;
    total = bytes > UINT64_MAX - total ? UINT64_MAX : total + bytes;
  }
  if (largest != nullptr) check_expansion(checkpoint, total, *largest);
}

void check_expansion(const Checkpoint& checkpoint, std::uint64_t bytes, const TensorInfo& largest) {
  const std::uint64_t stored = stored_bytes(checkpoint.files());
  const std::uint64_t budget = ExpansionBudget(stored).limit_bytes();
  if (bytes <= stored || bytes - stored <= budget) return;
  fail(ErrorCode::unsupported,
       "{}: {} of elements are stored in {}, of which tensor '{}' has {}; expected at most {} more than is stored (64 "
       "MiB, or 16 times the files); --expand allows it",
       checkpoint.path().string(), format_bytes(bytes), format_bytes(stored), printable(largest.name),
       format_bytes(largest.size_bytes()), format_bytes(budget));
}

}  // namespace tessera::checkpoint
