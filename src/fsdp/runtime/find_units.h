#pragma once
// Assignment of a model's parameters to units.

#include <torch/nn/module.h>

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/fsdp/flat_param_handle.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"

namespace tessera::fsdp {

struct FoundUnit {
  std::string name;                         // of the unit's module in the model
  torch::nn::Module* module = nullptr;      // the unit's module
  std::vector<NamedParameter> params;       // under their names in the model
  std::vector<torch::nn::Module*> modules;  // the modules that own the parameters, inner ones first
  Unit* sharded = nullptr;                  // the unit of a model inside this one that is sharded already; else null
  std::string prefix;                       // of names of that model

  // From the options of the model and those that the policy states for the unit.
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  MixedPrecision mixed_precision;
  bool offload_params = false;
  ProcessGroup group;
};

std::string_view strategy_name(ShardingStrategy strategy);

// Returns whether the model's mixed precision does not apply to parameters and buffers of a module itself.
bool keeps_full_precision(const torch::nn::Module& module, const Options& options);

// Returns the units of a model that is sharded over `group`: first the model itself, even if it has no parameters, then
// the units inside it in the order of the modules' children, inner units before outer ones. Models inside it that are
// sharded already keep their units. Throws Error(invalid_argument) if a parameter would be in two units, a module is a
// unit of a model that is not inside this one, or options of a unit contradict those of the model.
std::vector<FoundUnit> find_units(torch::nn::Module& model, const ProcessGroup& group, const Options& options);

// Throws Error(invalid_argument) unless all units compute on one device.
void check_one_device(const std::vector<FoundUnit>& units, const Options& options);

// Returns the groups of units that are not the model's own, in the order of the units.
std::vector<ProcessGroup> own_groups(const std::vector<FoundUnit>& units, const ProcessGroup& group);

// The parameters of units that have groups of their own.
struct OwnGroupParams {
  std::set<std::string> names;  // on any rank
  bool are_on_all_ranks = true;
};
// Returns those of all ranks of `group`. Throws Error(invalid_argument) on all ranks unless all ranks of such a group
// have its parameters, and no others have parameters of these names. A collective of `group`.
OwnGroupParams check_own_groups(const std::vector<FoundUnit>& units, const ProcessGroup& group);

}  // namespace tessera::fsdp
