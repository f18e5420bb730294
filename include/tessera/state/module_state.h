#pragma once
/// \file
/// Gets and sets the parameters and buffers of a module by name, as Python's `module.state_dict()` does.
/// PyTorch: `get_model_state_dict` and `set_model_state_dict` in torch/distributed/checkpoint/state_dict.py, and
/// `Module.load_state_dict`.
///
/// A name joins the names of the children on the way and the tensor's own name by dots. A module's own parameters come
/// first, then its buffers, then its children, each in order of registration. A tensor with several names is listed
/// under each. C++ has no non-persistent buffers, so all buffers are saved.

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "tessera/state/state_dict_options.h"
#include "tessera/state/value.h"

namespace tessera {

/// Returns the module's tensors, detached; they share memory with the module, except those that are gathered or moved.
/// For a parameter that is the local tensor of a DTensor (see tensor/dtensor_parameters.h), returns the DTensor, or
/// with `full_state_dict` the full tensor. A collective of `options.group`. Throws `Error(invalid_argument)` naming the
/// name if two tensors would have the same one, for a submodule that is not in the module, and as gather_state_dict.
StateDict get_model_state_dict(const torch::nn::Module& module, const StateDictOptions& options = {});

/// The names that only the module or only the state dict has. PyTorch: `_IncompatibleKeys`.
struct IncompatibleKeys {
  std::vector<std::string> missing;     ///< from the state dict and required, in the module's order
  std::vector<std::string> unexpected;  ///< in the module, in the state dict's order
};

/// Copies every tensor of `state_dict` into the module's tensor of the same name. The module's tensors keep their
/// memory, dtype and device, and stay shared if they were. One on meta (see fsdp/meta_init.h) gets memory on the device
/// of the given tensor and keeps its identity; PyTorch: `assign`. For a DTensor, `state_dict` holds a DTensor with the
/// same boxes or the full tensor. Returns the names that only one side has; if `strict`, they are errors. A collective
/// of `options.group`.
///
/// Law: either everything is copied, on all ranks, or nothing is changed. Throws one `Error(invalid_argument)` that
/// lists all problems, at most 20 of each kind: tensors of another shape or with other boxes, complex tensors for a
/// real parameter, values that are not tensors, and, if `strict`, missing and unexpected names.
IncompatibleKeys set_model_state_dict(torch::nn::Module& module, const StateDict& state_dict,
                                      const StateDictOptions& options = {});

}  // namespace tessera
