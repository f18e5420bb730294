#pragma once
/// \file
/// The parameters and buffers of a module by name, as Python's `module.state_dict()` has them, and loading them back.
/// PyTorch: `get_model_state_dict` and `set_model_state_dict` in torch/distributed/checkpoint/state_dict.py, and
/// `Module.load_state_dict`.
///
/// A name is the names of the children that lead there and the tensor's own, joined by dots. A module's own parameters
/// come first, then its buffers, then its children, each in order of registration. A tensor that several names have
/// comes under each. C++ has no buffers that are not saved ("non-persistent"), so all are.

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

#include "tessera/state/value.h"

namespace tessera {

/// The tensors themselves, detached: what is written to one is written to the module. Of a parameter that is the local
/// tensor of a DTensor (see tensor/dtensor_parameters.h) that one. Throws `Error(invalid_argument)` naming a name that
/// two tensors would have.
StateDict get_model_state_dict(const torch::nn::Module& module);

/// PyTorch: StateDictOptions.
struct StateDictOptions {
  /// Whether names that are missing and names that are not asked for are errors.
  bool strict = true;
  /// Called when all was found right, before anything is changed; if it throws, nothing is. So ranks can agree.
  std::function<void()> confirm = nullptr;
};

/// Names that only one of module and state has. PyTorch: `_IncompatibleKeys`.
struct IncompatibleKeys {
  std::vector<std::string> missing;     ///< in the state, in the module's order
  std::vector<std::string> unexpected;  ///< in the module, in the state's order
};

/// Copies every tensor of `state_dict` into the module's tensor of its name, which stays where it is, of its dtype and
/// device, and shared if it was. For a DTensor it has one that is cut alike, or the whole tensor. Names that only one
/// has are returned, or an error if strict.
///
/// Law: either all is copied or nothing is changed. Throws `Error(invalid_argument)` that names everything that is
/// wrong: tensors of another shape, cut in another way, complex ones for a real parameter, values that are no tensor,
/// and, if strict, missing and unexpected names. At most 20 of each kind are listed.
IncompatibleKeys set_model_state_dict(torch::nn::Module& module, const StateDict& state_dict,
                                      const StateDictOptions& options = {});

}  // namespace tessera
