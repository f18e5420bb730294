#pragma once
// The flattened form of an optimizer's state dict; see StateDictOptions::flatten_optimizer_state_dict.

#include <optional>
#include <string>

#include "state/parameter_names.h"
#include "tessera/state/value.h"

namespace torch::optim {
class Optimizer;
}

namespace tessera {

// Returns "state.<parameter>.<key>" and "param_groups.<parameter>.<option>" for each entry of a nested state dict with
// names. Throws Error(unsupported) for state that is neither a tensor nor a number.
StateDict flatten_optimizer_state(const StateDict& nested);

// Returns whether a state dict has neither of the keys of the nested form. An empty one is the flattened state of an
// optimizer without parameters, and else of neither form.
bool is_flattened(const StateDict& state_dict, const torch::optim::Optimizer& optimizer);

// Returns the nested form, with the groups of `optimizer`; those without parameters have no options. Parameters that
// are not in `flat` are left out. Those of other optimizers follow in a group without options. Throws
// Error(invalid_argument) if the parameters of a group have different options.
StateDict unflatten_optimizer_state(const StateDict& flat, const ParameterNames& names,
                                    const torch::optim::Optimizer& optimizer);

// Returns the parameter that a key of the flattened state belongs to, or nothing for another key.
std::optional<std::string> parameter_of_flat_state(const Key& key);

}  // namespace tessera
