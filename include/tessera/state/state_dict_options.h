#pragma once
/// \file
/// The options of the functions that get and set state dicts of models and optimizers. PyTorch: StateDictOptions in
/// torch/distributed/checkpoint/state_dict.py.
///
/// With a `group` of several ranks, each of these functions is a collective of the group: all ranks must pass equal
/// options. If any rank throws, every rank throws an error naming it, and a set function changes nothing on any rank.

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <vector>

#include "tessera/comm/process_group.h"

namespace tessera {

struct StateDictOptions {
  /// The ranks that call the function together. By default this process alone.
  ProcessGroup group = {};

  /// When getting: whether sharded tensors are gathered into full tensors; see gather_state_dict.h. `group` must
  /// contain the ranks of their meshes.
  bool full_state_dict = false;
  /// When getting: whether tensors are moved to the CPU. With `full_state_dict`, only rank 0 of the group gets the
  /// state dict; the other ranks get an empty one.
  bool cpu_offload = false;
  /// Whether parameters that do not require grad are left out of a model's state dict. When setting, their names may be
  /// missing. Optimizers ignore this, as in PyTorch.
  bool ignore_frozen_params = false;
  /// The submodules whose parameters and buffers a model's state dict contains; all of them if empty. When setting,
  /// other names may be missing. Optimizers ignore this, as in PyTorch. PyTorch: the argument `submodules`.
  std::vector<std::shared_ptr<torch::nn::Module>> submodules = {};
  /// Whether names begin at the model even with `submodules`. If false, they begin at the submodule. With several
  /// submodules, two tensors may then have the same name, which is an error.
  bool keep_submodule_prefixes = true;
  /// When getting: whether an optimizer's state dict has no nested dicts; see optimizer_state.h. When setting, both
  /// forms are accepted.
  bool flatten_optimizer_state_dict = false;

  /// When setting: whether missing and unexpected names of a model, the missing state of a parameter, and unknown
  /// options and keys of an optimizer are errors.
  bool strict = true;
  /// When setting: whether all ranks take the state dict of rank 0 of the group, which consists of full tensors. The
  /// other ranks may pass an empty one. It is sent one parameter at a time. Requires `full_state_dict`.
  bool broadcast_from_rank0 = false;
  /// When setting: whether an optimizer takes over tensors whose dtype and device fit instead of copying them. The
  /// caller must not use the state afterwards, so do not set it for a state that was returned for another optimizer.
  bool take_tensors = false;
  /// When setting: called after all checks and before the first change. If it throws, nothing is changed on any rank.
  /// All ranks of the group must set it, or none. It must not communicate in `group`, whose ranks agree on its outcome.
  std::function<void()> confirm = nullptr;
};

}  // namespace tessera
