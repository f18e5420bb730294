#pragma once
/// \file
/// A planner, which decides which rank saves what. The default behaves as PyTorch's. Derive from it to omit or rename
/// values or to save other elements.
///
/// A save calls `create_local_plan` on every rank and `create_global_plan` on the coordinator. Then every rank calls
/// `resolve_tensor` and `resolve_object` for the items it writes, from several threads at once.
/// PyTorch: torch/distributed/checkpoint/planner.py (SavePlanner), default_planner.py.

#include "tessera/checkpoint/flat_state.h"
#include "tessera/checkpoint/global_save_plan.h"
#include "tessera/checkpoint/save_plan.h"

namespace tessera::checkpoint {

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
