#pragma once
/// \file
/// The merged save plan of all ranks: the metadata of the checkpoint and which rank writes which item.
///
/// Laws: every item of every rank's plan is in the metadata; items of equal name and box are one chunk, which one of
/// the ranks that have it writes; the chunks of each tensor partition its shape. The merge is a pure function: equal
/// plans give equal results.
///
/// Cost: O(n log n) for n items of all ranks; about 100 bytes of memory per item, in addition to the gathered plans.
/// PyTorch: torch/distributed/checkpoint/default_planner.py, _dedup_save_plans.py.

#include <cstdint>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/checkpoint/flat_state.h"
#include "tessera/checkpoint/save_plan.h"
#include "tessera/format/dcp_metadata.h"

namespace tessera::checkpoint {

/// The encoded plans of all ranks, decoded on access.
class GatheredPlans {
 public:
  struct Encoded {
    Bytes entries;  ///< empty if equal to those of the reference
    Bytes items;
  };
  /// \param reference the rank whose entries other ranks need not repeat.
  explicit GatheredPlans(std::vector<Encoded> plans, std::size_t reference = 0)
      : plans_(std::move(plans)), reference_(reference) {}
  std::size_t ranks() const { return plans_.size(); }
  std::size_t reference() const { return reference_; }
  ByteView entries(std::size_t rank) const { return plans_[plans_[rank].entries.empty() ? reference_ : rank].entries; }
  ByteView items(std::size_t rank) const { return plans_[rank].items; }
  SavePlan plan(std::size_t rank) const { return SavePlan::decode(entries(rank), items(rank)); }
  std::uint64_t size_bytes() const;  ///< of all encoded plans

 private:
  std::vector<Encoded> plans_;
  std::size_t reference_;
};

struct GlobalSavePlan {
  /// An item that a rank writes.
  struct Written {
    std::uint32_t item = 0;              ///< in the rank's plan
    std::uint32_t entry = 0, chunk = 0;  ///< in the metadata
    std::uint64_t stored_bytes = 0;      ///< for chunks of tensors only
    bool operator==(const Written&) const = default;
  };
  dcp::Metadata metadata;                     ///< complete except for the locations of stored items
  std::vector<std::vector<Written>> written;  ///< written[r] is in the order of rank r's plan
};

/// The rule by which one of the ranks that have a chunk is selected to write it.
enum class Replicas : std::uint8_t {
  spread,       ///< assign each replica to the rank with the fewest bytes so far, which balances the ranks
  lowest_rank,  ///< assign each replica to the lowest rank that has it
};

/// Merges the plans of all ranks. Throws `Error(invalid_argument)` if they do not form a state: a name is a tensor on
/// one rank and an object on another, or differs in dtype, shape or path (the error names both ranks); a chunk is
/// outside its tensor's shape; chunks overlap or leave elements uncovered (the error names tensor and boxes); a plan
/// has a name twice. Throws `Error(corrupt)` for a malformed plan.
///
/// A tensor without elements gets one chunk if any rank has one. Empty chunks of other tensors are dropped.
GlobalSavePlan make_global_plan(const GatheredPlans& plans, Replicas replicas = Replicas::spread);

/// A planner that decides which rank saves what. The default behaves as PyTorch's. Derive from it to omit or rename
/// values or to save other elements.
///
/// A save calls `create_local_plan` on every rank and `create_global_plan` on the coordinator. Then every rank calls
/// `resolve_tensor` and `resolve_object` for the items it writes, from several threads at once.
/// PyTorch: torch/distributed/checkpoint/planner.py (SavePlanner), default_planner.py.
class SavePlanner {
 public:
  virtual ~SavePlanner() = default;

  /// Returns this rank's plan. The default has every chunk and every object of `state`.
  virtual SavePlan create_local_plan(const FlatState& state);
  /// Merges the plans of all ranks. The default is `make_global_plan(plans, Replicas::spread)`. Must be a pure
  /// function: it is not called if a SavePlanCache has the result for equal plans.
  virtual GlobalSavePlan create_global_plan(const GatheredPlans& plans);
  /// Returns the elements of an item of this rank's plan, with the dtype and sizes that the plan specifies.
  virtual HostMemory resolve_tensor(const FlatState& state, const SavePlan& plan, std::size_t item);
  /// Returns the torch.save archive of an object of this rank's plan.
  virtual Bytes resolve_object(const FlatState& state, const SavePlan& plan, std::size_t item);
};

}  // namespace tessera::checkpoint
