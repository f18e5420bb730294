#include "tessera/state/state_dict.h"

#include <utility>

#include "state/map_tensors.h"
#include "state/optimizer/flatten.h"
#include "tessera/base/error.h"
#include "tessera/state/gather_state_dict.h"
#include "tessera/state/internal/entries_of_rank0.h"
#include "tessera/state/internal/local_state_dict.h"
#include "tessera/tensor/dtensor.h"

namespace tessera {

namespace {

using Optimizers = std::vector<torch::optim::Optimizer*>;

// Checks the options and the optimizers, and adds the options, which must be equal on all ranks.
void check_options(const torch::nn::Module& module, const Optimizers& optimizers, const StateDictOptions& options,
                   CallArguments& arguments) {
  if (options.broadcast_from_rank0 && !options.full_state_dict) {
    fail(ErrorCode::invalid_argument,
         "broadcast_from_rank0 is set and full_state_dict is not, expected full_state_dict to be set too");
  }
  for (std::size_t i = 0; i < optimizers.size(); ++i) {
    if (optimizers[i] == nullptr) fail(ErrorCode::invalid_argument, "optimizer {} is null, expected an optimizer", i);
  }
  arguments.add("optimizers", optimizers.size())
      .add("full_state_dict", options.full_state_dict)
      .add("cpu_offload", options.cpu_offload)
      .add("ignore_frozen_params", options.ignore_frozen_params)
      .add("keep_submodule_prefixes", options.keep_submodule_prefixes)
      .add("flatten_optimizer_state_dict", options.flatten_optimizer_state_dict)
      .add("strict", options.strict)
      .add("broadcast_from_rank0", options.broadcast_from_rank0)
      .add("take_tensors", options.take_tensors)
      .add("confirm", options.confirm ? "set" : "null");
  for (const std::string& prefix : submodule_prefixes(module, options)) arguments.add("submodule", printable(prefix));
}

// --- getting

StateDict local_state_of(const torch::nn::Module& module, const Optimizers& optimizers, const ParameterParts& parts,
                         bool flatten) {
  Dict states;
  List groups;
  for (const torch::optim::Optimizer* optimizer : optimizers) {
    StateDict one = local_optimizer_state(module, *optimizer, parts);
    for (auto& [key, state] : one.at("state").get<Dict>()) states.insert_or_assign(key, state);
    for (Value& group : one.at("param_groups").get<List>()) groups.push_back(std::move(group));
  }
  StateDict nested{{"state", std::move(states)}, {"param_groups", std::move(groups)}};
  return flatten ? flatten_optimizer_state(nested) : nested;
}

// Returns the value on the CPU.
Value on_cpu(const Value& value) {
  if (const auto* tensor = value.get_if<at::Tensor>()) return tensor->cpu();
  const DTensor tensor = *DTensor::from_checkpointable(value.get<std::shared_ptr<Checkpointable>>());
  return DTensor(tensor.device_mesh(), tensor.layout(), tensor.local_tensor().cpu());
}

// Gets the state of the module, if `with_model` is set, and of the optimizers.
StateDicts get_states(std::string_view operation, const torch::nn::Module& module, bool with_model,
                      const Optimizers& optimizers, const StateDictOptions& options) {
  StateDict both;
  options.group.check_call(operation, [&](CallArguments& arguments) {
    check_options(module, optimizers, options, arguments);
    const ParameterParts parts(module);
    both["model"] = with_model ? local_model_state(module, parts, options) : Dict();
    both["optimizer"] = local_state_of(module, optimizers, parts, options.flatten_optimizer_state_dict);
  });
  if (options.full_state_dict) {
    both = gather_state_dict(both, options.group, options.cpu_offload);
    if (both.empty()) return {};
  } else if (options.cpu_offload) {
    both = map_tensors(both, on_cpu);
  }
  return {std::move(both.at("model").get<Dict>()), std::move(both.at("optimizer").get<Dict>())};
}

// --- setting

// Converts the full tensors of rank 0 to this rank's parts, so that a rank holds one full tensor at a time.
class Localizer {
 public:
  Localizer(const torch::nn::Module& module, const ParameterParts& parts) : parts_(parts) {
    for (const auto& parameter : module.named_parameters()) parameters_[parameter.key()] = parameter.value();
  }

  // Returns the part of `value`: a tensor that belongs to the parameter `name`, or a dict of its optimizer state.
  Value operator()(const std::string& name, const Value& value) const {
    const auto parameter = parameters_.find(name);
    if (parameter == parameters_.end() || parts_.find(parameter->second) == nullptr) return value;
    const auto* state = value.get_if<Dict>();
    if (state == nullptr) return part_of(parameter->second, value);
    return map_tensors(*state, [&](const Value& tensor) { return part_of(parameter->second, tensor); });
  }

 private:
  // Returns `value` itself if it is not of the parameter's size; setting it is then an error or it is no part.
  Value part_of(const at::Tensor& parameter, const Value& value) const {
    const std::optional<at::Tensor> local = parts_.from_state(parameter, value);
    return local ? parts_.to_state(parameter, local->clone()) : value;
  }

  const ParameterParts& parts_;
  std::map<std::string, at::Tensor> parameters_;
};

std::string name_in(const Key& key) {
  if (const auto of_flat = parameter_of_flat_state(key)) return *of_flat;
  const auto* name = std::get_if<std::string>(&key);
  return name != nullptr ? *name : std::string();
}

// Returns rank 0's state dict, entry by entry of each dict in it, with this rank's parts of tensors. A collective.
StateDict from_rank0(const StateDict& state, const ProcessGroup& group, const Localizer& localize) {
  const bool is_sender = group.rank() == 0;
  StateDict outer;
  for (const auto& [key, value] : state) outer.insert_or_assign(key, value.is<Dict>() ? Dict() : value);
  StateDict result;
  for_each_entry_of_rank0(outer, group, [&](const Key& key, const Value& value) {
    result.insert_or_assign(key, localize(name_in(key), value));
  });
  for (const auto& [key, value] : StateDict(result)) {
    if (!value.is<Dict>()) continue;
    Dict inner;
    for_each_entry_of_rank0(is_sender ? state.at(key).get<Dict>() : Dict(), group,
                            [&](const Key& inner_key, const Value& inner_value) {
                              inner.insert_or_assign(inner_key, localize(name_in(inner_key), inner_value));
                            });
    result.insert_or_assign(key, std::move(inner));
  }
  return result;
}

// Sets the state of the module, unless `model_state` is null, and of the optimizers.
IncompatibleKeys set_states(std::string_view operation, const torch::nn::Module& module, const StateDict* model_state,
                            const Optimizers& optimizers, const StateDict& optimizer_state,
                            const StateDictOptions& options) {
  options.group.check_call(operation,
                           [&](CallArguments& arguments) { check_options(module, optimizers, options, arguments); });
  const ParameterParts parts(module);
  StateDicts sent;
  if (options.broadcast_from_rank0) {
    const Localizer localize(module, parts);
    if (model_state != nullptr) sent.model = from_rank0(*model_state, options.group, localize);
    if (!optimizers.empty()) sent.optimizer = from_rank0(optimizer_state, options.group, localize);
  }
  const bool is_sent = options.broadcast_from_rank0;
  ModelStatePlan model;
  std::vector<std::function<void()>> changes;
  options.group.agree_on(operation, [&] {
    if (model_state != nullptr) {
      model = plan_model_state(module, is_sent ? sent.model : *model_state, parts, options);
      changes.push_back(model.set);
    }
    for (torch::optim::Optimizer* optimizer : optimizers) {
      changes.push_back(
          plan_optimizer_state(module, *optimizer, is_sent ? sent.optimizer : optimizer_state, parts, options));
    }
  });
  if (options.confirm) options.group.agree_on(operation, options.confirm);
  for (const auto& change : changes) change();
  return std::move(model.incompatible);
}

}  // namespace

StateDict get_model_state_dict(const torch::nn::Module& module, const StateDictOptions& options) {
  return get_states("get model state dict", module, /*with_model=*/true, {}, options).model;
}

StateDict get_optimizer_state_dict(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                                   const StateDictOptions& options) {
  return get_optimizer_state_dict(module, Optimizers{const_cast<torch::optim::Optimizer*>(&optimizer)}, options);
}

StateDict get_optimizer_state_dict(const torch::nn::Module& module, const Optimizers& optimizers,
                                   const StateDictOptions& options) {
  return get_states("get optimizer state dict", module, /*with_model=*/false, optimizers, options).optimizer;
}

StateDicts get_state_dict(const torch::nn::Module& module, const Optimizers& optimizers,
                          const StateDictOptions& options) {
  return get_states("get state dict", module, /*with_model=*/true, optimizers, options);
}

IncompatibleKeys set_model_state_dict(torch::nn::Module& module, const StateDict& state_dict,
                                      const StateDictOptions& options) {
  return set_states("set model state dict", module, &state_dict, {}, {}, options);
}

void set_optimizer_state_dict(const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                              const StateDict& state_dict, const StateDictOptions& options) {
  set_optimizer_state_dict(module, Optimizers{&optimizer}, state_dict, options);
}

void set_optimizer_state_dict(const torch::nn::Module& module, const Optimizers& optimizers,
                              const StateDict& state_dict, const StateDictOptions& options) {
  set_states("set optimizer state dict", module, nullptr, optimizers, state_dict, options);
}

IncompatibleKeys set_state_dict(torch::nn::Module& module, const Optimizers& optimizers, const StateDict& model_state,
                                const StateDict& optimizer_state, const StateDictOptions& options) {
  return set_states("set state dict", module, &model_state, optimizers, optimizer_state, options);
}

}  // namespace tessera
