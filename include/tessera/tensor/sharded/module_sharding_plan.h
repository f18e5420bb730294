#pragma once
/// \file
/// A plan that shards a module: its parameters, its submodules by custom sharders, and its results.
///
///     struct BlockImpl : torch::nn::Module, PlannedOutput {
///       ModuleOutput forward(const at::Tensor& x) {
///         return planned_output(ops::linear(x, fc->sharded_parameter("weight", fc->weight), fc->bias));
///       }
///       ShardedLinear fc{...};
///     };
///     shard_module(*net, ModuleShardingPlan{.parameters = {{"block.fc.weight", columns}},
///                                           .output_plan = {{"block", rows}},
///                                           .return_local_tensor = {"block"}}, group);
///
/// In PyTorch, forward hooks change the results, and a Sharder's module replaces the one that it was given. A LibTorch
/// module has no hooks, and its submodules are members of its class. So the module itself calls `planned_output`, and
/// the parent of a module that is replaced sets its own member. PyTorch: ShardingPlan in
/// torch/distributed/_shard/sharding_plan/api.py, torch/distributed/_shard/sharder.py.

#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "tessera/tensor/ops.h"
#include "tessera/tensor/partial_tensor.h"
#include "tessera/tensor/shard_module.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera {

/// What a module with a plan returns: a local tensor if the plan states so, else a tensor of all ranks.
using ModuleOutput = std::variant<ShardedTensor, PartialTensor, at::Tensor>;

/// Base of the modules whose results a plan changes; they also derive from torch::nn::Module.
class PlannedOutput {
 public:
  virtual ~PlannedOutput() = default;
  bool has_output_plan() const { return plan_.spec != nullptr || plan_.is_local; }

 protected:
  PlannedOutput() = default;
  PlannedOutput(const PlannedOutput&) = default;
  PlannedOutput& operator=(const PlannedOutput&) = default;

  /// Returns `result` as the plan states, or as it is without a plan for this module. First reshards it by the spec of
  /// `output_plan`: a ShardedTensor in place, as ShardedTensor::reshard; a PartialTensor is reduced, differentiably.
  /// If the module is in `return_local_tensor`, then returns the local tensor of a ShardedTensor, without the sharded
  /// dimension if its size there is 1. A collective if it reshards. Throws as `reshard`, and `Error(unsupported)` if
  /// this rank has no shard or several; the other ranks are notified.
  ModuleOutput planned_output(const ops::LinearResult& result) const;

 private:
  friend class OutputPlanner;
  struct Plan {
    ShardedTensor::SpecPtr spec;  // null to leave the result as it is
    bool is_local = false;
  };
  Plan plan_;
};

/// A custom sharder of a submodule. PyTorch: Sharder.
class Sharder {
 public:
  virtual ~Sharder() = default;
  /// Shards `module`, which is named `name` in the module that the plan is for, and returns it or the module to replace
  /// it. All ranks call it with the same module, so it may call collectives of `group`.
  virtual std::shared_ptr<torch::nn::Module> shard(const std::string& name,
                                                   const std::shared_ptr<torch::nn::Module>& module,
                                                   const ProcessGroup& group) = 0;
};

/// Base of the modules of which a Sharder may replace a submodule.
class ReplaceableSubmodules {
 public:
  virtual ~ReplaceableSubmodules() = default;
  /// Makes `module` the submodule `name`: sets the member, and calls Module::replace_module. Throws
  /// `Error(invalid_argument)` if `module` is not of the class that the member needs.
  virtual void replace_submodule(const std::string& name, const std::shared_ptr<torch::nn::Module>& module) = 0;
};

struct ModuleShardingPlan {
  ShardingPlan parameters;                                         ///< by the parameter's name
  std::map<std::string, std::shared_ptr<Sharder>> sharders = {};   ///< by the submodule's name
  std::map<std::string, ShardedTensor::SpecPtr> output_plan = {};  ///< by the module's name; "" is the root
  std::vector<std::string> return_local_tensor = {};               ///< names of modules
};

/// Carries out `plan`: shards the parameters, calls the sharders in the order of their names, and plans the results of
/// the modules that have the names then. A collective of `group`.
///
/// Every rank throws before anything changes: as `shard_module` for the parameters, and `Error(invalid_argument)` if
/// the plans of the ranks differ or, on any rank,
/// - a name is not that of a module, a sharder has the name "", or a sharder or a spec is null
/// - a parameter of the plan belongs to a module that a sharder shards
/// - a module of `output_plan` or `return_local_tensor` is not a PlannedOutput or has a plan already
///
/// A module of these two that a sharder shards, or that is in such a module, is looked up and checked after the
/// sharders. If one does not pass, if a sharder throws or returns null on any rank, if the classes of the modules that
/// it returns differ, or if the parent of a module to be replaced is not a ReplaceableSubmodules, every rank throws,
/// and the module stays partly sharded.
void shard_module(torch::nn::Module& module, const ModuleShardingPlan& plan, const ProcessGroup& group = {},
                  int src = 0);

}  // namespace tessera
