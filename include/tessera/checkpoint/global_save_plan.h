#pragma once
/// \file
/// What all ranks together will save: the metadata of the checkpoint, and who writes what.
///
/// Laws: every item of every rank's plan is in the metadata; those of equal name and box are one chunk, which one of
/// the ranks that have it writes; the chunks of each tensor partition its shape. A pure function of the plans: the same
/// plans give the same result.
///
/// Cost: O(n log n) for n items in all; memory about 100 bytes an item, beside what is gathered.
/// PyTorch: torch/distributed/checkpoint/default_planner.py, _dedup_save_plans.py.

#include <cstdint>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/checkpoint/save_plan.h"
#include "tessera/format/dcp_metadata.h"

namespace tessera::checkpoint {

/// The plans of all ranks as they were sent, decoded when asked for.
class GatheredPlans {
 public:
  struct Encoded {
    /// Empty: those of rank 0.
    Bytes entries;
    Bytes items;
  };
  explicit GatheredPlans(std::vector<Encoded> plans) : plans_(std::move(plans)) {}
  std::size_t ranks() const { return plans_.size(); }
  ByteView entries(std::size_t rank) const { return plans_[plans_[rank].entries.empty() ? 0 : rank].entries; }
  ByteView items(std::size_t rank) const { return plans_[rank].items; }
  SavePlan plan(std::size_t rank) const { return SavePlan::decode(entries(rank), items(rank)); }
  std::uint64_t size_bytes() const;

 private:
  std::vector<Encoded> plans_;
};

struct GlobalSavePlan {
  /// An item that a rank writes, and which chunk of which of the metadata's entries it is.
  struct Written {
    std::uint32_t item = 0;
    std::uint32_t entry = 0, chunk = 0;
    std::uint64_t stored_bytes = 0;  ///< of a tensor's
    bool operator==(const Written&) const = default;
  };
  dcp::Metadata metadata;                     ///< complete but for where items are stored
  std::vector<std::vector<Written>> written;  ///< by rank, in the order of its plan
};

enum class Replicas : std::uint8_t {
  spread,       ///< each to the rank with the fewest bytes so far, so that all write about as much
  lowest_rank,  ///< to the first rank that has it
};

/// Throws `Error(invalid_argument)` where the plans don't make up a state: a name that is a tensor here and an object
/// there, or of another dtype, shape or path (naming both ranks), a chunk outside of its tensor's shape, chunks that
/// overlap, elements that no rank has (naming tensor and boxes), a name twice in a plan, a plan that is malformed.
/// A tensor without elements has one chunk, if any rank has one; empty chunks of other tensors are left out.
GlobalSavePlan make_global_plan(const GatheredPlans& plans, Replicas replicas = Replicas::spread);

}  // namespace tessera::checkpoint
