#pragma once
/// \file
/// Decides what is saved by whom. The default does what PyTorch's does; derive from it to leave things out, to rename
/// them, or to save other elements than those of the state.
///
/// A save calls `create_local_plan` on every rank, `create_global_plan` on rank 0, and then `resolve_tensor` and
/// `resolve_object` for what this rank writes, from several threads at once.
/// PyTorch: torch/distributed/checkpoint/planner.py (SavePlanner), default_planner.py.

#include "tessera/checkpoint/flat_state.h"
#include "tessera/checkpoint/global_save_plan.h"
#include "tessera/checkpoint/save_plan.h"

namespace tessera::checkpoint {

class SavePlanner {
 public:
  virtual ~SavePlanner() = default;

  /// This rank's part: by default every chunk and every object of the state.
  virtual SavePlan create_local_plan(const FlatState& state);
  /// By default `make_global_plan(plans, Replicas::spread)`. Must be a pure function of the plans: where they are those
  /// of the save before, it may not be called.
  virtual GlobalSavePlan create_global_plan(const GatheredPlans& plans);
  /// The elements of an item of this rank's plan, of the dtype and the sizes that the plan says.
  virtual HostMemory resolve_tensor(const FlatState& state, const SavePlan& plan, std::size_t item);
  /// The torch.save archive of an object of this rank's plan.
  virtual Bytes resolve_object(const FlatState& state, const SavePlan& plan, std::size_t item);
};

}  // namespace tessera::checkpoint
