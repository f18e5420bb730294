// State dicts of an optimizer of a sharded model.

#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

#include <set>

#include "fsdp/groups.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/state/sharded_params.h"
#include "tessera/base/error.h"
#include "tessera/state/internal/local_state_dict.h"

namespace tessera::fsdp {

namespace {

// Returns whether a value has one element per element of the parameter.
bool is_elementwise(const Value& value) {
  const auto* tensor = value.get_if<at::Tensor>();
  return value.is_any_tensor() && !(tensor != nullptr && tensor->dim() == 0);
}

// A module with the parameters that an optimizer works on, for local_optimizer_state: with use_orig_params the model
// itself, otherwise a module that contains the flat parameters and the parameters that are in none.
class OptimizedModule {
 public:
  explicit OptimizedModule(const Runtime& runtime)
      : runtime_(runtime), params_(sharded_params(runtime)), parts_(unsharded_parts(runtime)) {
    if (runtime.options().use_orig_params) {
      module_ = runtime.module();
      return;
    }
    module_ = std::make_shared<torch::nn::Module>();
    std::set<const void*> seen;
    for (const Unit* unit : runtime.units()) {
      const std::string name = fmt::format("unit{}", flat_.size());
      module_->register_parameter(name, unit->handle()->flat_param());
      flat_[name] = unit->handle();
      for (const at::Tensor& param : unit->handle()->params()) seen.insert(param.unsafeGetTensorImpl());
    }
    for (const auto& param : runtime.module()->named_parameters()) {
      if (!param.value().defined() || !seen.insert(param.value().unsafeGetTensorImpl()).second) continue;
      const std::string name = fmt::format("other{}", others_.size());
      module_->register_parameter(name, param.value(), param.value().requires_grad());
      others_[name] = param.key();
    }
  }

  torch::nn::Module& module() const { return *module_; }
  const ShardedParams& params() const { return params_; }
  // The parts of all other parameters that are local tensors of DTensors.
  const ParameterParts& parts() const { return parts_; }

  // Converts a state by names in module() to one by names in the model. Sharded tensors become a FlatParamPart.
  StateDict to_parameters(const StateDict& optimized) const {
    Dict states;
    for (const auto& [key, value] : optimized.at("state").get<Dict>()) {
      const std::string& name = std::get<std::string>(key);
      const Dict& state = value.get<Dict>();
      if (const auto flat = flat_.find(name); flat != flat_.end()) {
        const FlatParamHandle& handle = *flat->second;
        for (std::size_t i = 0; i < handle.params().size(); ++i) {
          const std::string& fqn = handle.layout().params()[i].fqn;
          const auto part_of = [&](const at::Tensor& shard) -> Value {
            if (const auto found = params_.find(fqn); found != params_.end()) {
              return found->second.part(handle.piece_of(shard, i));
            }
            return parts_.to_state(handle.params()[i], handle.unflatten_as(shard)[i]);
          };
          states[fqn] = with_parts(state, fqn, handle.layout().sharded_numel(), part_of);
        }
      } else if (const auto found = params_.find(name); found != params_.end()) {
        const ShardedParam& param = found->second;
        const at::Tensor piece = param.handle->piece_of(param.handle->flat_param(), param.index);
        states[name] =
            with_parts(state, name, piece.numel(), [&](const at::Tensor& of) -> Value { return param.part(of); });
      } else {
        states[name_of_other(name)] = value;
      }
    }
    StateDict result{{"state", std::move(states)}, {"param_groups", optimized.at("param_groups")}};
    for (Value& group : result.at("param_groups").get<List>()) {
      List names;
      for (const Value& param : group.get<Dict>().at("params").get<List>()) {
        const auto& name = param.get<std::string>();
        if (const auto flat = flat_.find(name); flat != flat_.end()) {
          for (const ParamInfo& info : flat->second->layout().params()) names.push_back(info.fqn);
        } else {
          names.push_back(name_of_other(name));
        }
      }
      group.get<Dict>()["params"] = std::move(names);
    }
    return result;
  }

  // The inverse. `states` contains pieces of sharded parameters, and full tensors of others.
  StateDict to_optimized(const Dict& states, const List& groups) const {
    StateDict result{{"state", Dict()}, {"param_groups", List()}};
    Dict& optimized = result.at("state").get<Dict>();
    std::map<std::string, std::string> names;  // names in module(), by names in the model
    for (const auto& [flat_name, handle] : flat_) {
      for (const ParamInfo& info : handle->layout().params()) names[info.fqn] = flat_name;
      Dict flat = flat_state_of(*handle, states);
      if (!flat.empty()) optimized[flat_name] = std::move(flat);
    }
    for (const auto& [name, fqn] : others_) names[fqn] = name;
    for (const auto& [key, state] : states) {
      const auto found = names.find(std::get<std::string>(key));
      if (found == names.end()) {
        optimized[key] = state;
      } else if (flat_.count(found->second) == 0) {
        optimized[found->second] = state;
      }
    }
    for (Value group : groups) {
      List params;
      std::set<std::string> seen;
      for (const Value& param : group.get<Dict>().at("params").get<List>()) {
        const auto& fqn = param.get<std::string>();
        if (runtime_.is_of_other_ranks(fqn)) continue;
        const auto found = names.find(fqn);
        const std::string& name = found == names.end() ? fqn : found->second;
        if (seen.insert(name).second) params.push_back(name);
      }
      group.get<Dict>()["params"] = std::move(params);
      result.at("param_groups").get<List>().push_back(std::move(group));
    }
    return result;
  }

 private:
  const std::string& name_of_other(const std::string& name) const {
    const auto found = others_.find(name);
    return found == others_.end() ? name : found->second;
  }

  // Returns `state` with `part_of` applied to its tensors, which must be one-dimensional with `numel` elements.
  static Dict with_parts(const Dict& state, const std::string& fqn, std::int64_t numel,
                         const std::function<Value(const at::Tensor&)>& part_of) {
    Dict parts;
    for (const auto& [key, value] : state) {
      const at::Tensor* tensor = value.get_if<at::Tensor>();
      if (tensor == nullptr || tensor->dim() == 0) {
        parts[key] = value;
        continue;
      }
      if (tensor->dim() != 1 || tensor->numel() != numel) {
        fail(ErrorCode::invalid_argument,
             "the optimizer's {} of '{}' has shape {}, expected [{}], this rank's elements: construct the optimizer "
             "from the sharded model's parameters()",
             to_string(key), printable(fqn), shape_to_string(tensor->sizes().vec()), numel);
      }
      parts[key] = part_of(*tensor);
    }
    return parts;
  }

  // Assembles the state of a flat parameter from those of its parameters.
  Dict flat_state_of(const FlatParamHandle& handle, const Dict& states) const {
    Dict flat;
    for (std::size_t i = 0; i < handle.params().size(); ++i) {
      const Value* state = states.find(handle.layout().params()[i].fqn);
      if (state == nullptr) continue;
      for (const auto& [key, value] : state->get<Dict>()) {
        if (!is_elementwise(value)) {
          flat[key] = value;
          continue;
        }
        const bool has_pieces = is_sharded(handle.options().strategy);
        const at::Tensor piece = has_pieces ? value.get<at::Tensor>() : local_tensor(handle, i, key, value);
        if (!flat.contains(key)) {
          flat[key] =
              at::zeros({handle.layout().sharded_numel()}, piece.options().device(handle.flat_param().device()));
        }
        const at::Tensor& shard = flat.at(key).get<at::Tensor>();
        const at::Tensor to = has_pieces ? handle.piece_of(shard, i) : handle.unflatten_as(shard)[i];
        to.copy_(piece);
      }
    }
    return flat;
  }

  at::Tensor local_tensor(const FlatParamHandle& handle, std::size_t i, const Key& key, const Value& value) const {
    const at::Tensor& param = handle.params()[i];
    if (const std::optional<at::Tensor> local = parts_.from_state(param, value)) return *local;
    fail(ErrorCode::invalid_argument, "{} of '{}' is {}, expected a tensor of shape {}", to_string(key),
         printable(handle.layout().params()[i].fqn), to_string(value, 60), shape_to_string(parts_.size_of(param)));
  }

  const Runtime& runtime_;
  ShardedParams params_;
  ParameterParts parts_;
  std::shared_ptr<torch::nn::Module> module_;
  std::map<std::string, FlatParamHandle*> flat_;  // by names in module_
  std::map<std::string, std::string> others_;     // names in the model, by names in module_
};

// Replaces parts by full tensors. A collective.
void make_full(Dict& states, const ShardedParams& params, const std::vector<Unit*>& units,
               const FullStateOptions& full) {
  for (const auto& [name, state] : Dict(states)) {
    if (params.count(std::get<std::string>(name)) != 0) continue;
    for (const auto& [key, value] : state.get<Dict>()) {
      if (value.is_any_tensor()) states.at(name).get<Dict>()[key] = full_copy_of(value, full);
    }
  }
  for (const Unit* unit : units) {
    const FlatParamHandle& handle = *unit->handle();
    std::map<std::string, std::vector<Piece>> pieces;  // by the key of the state
    for (std::size_t i = 0; i < handle.params().size(); ++i) {
      const Value* state = states.find(handle.layout().params()[i].fqn);
      if (state == nullptr) continue;
      for (const auto& [key, value] : state->get<Dict>()) {
        const auto* part = value.get_if<std::shared_ptr<Checkpointable>>();
        if (part == nullptr) continue;
        pieces[std::get<std::string>(key)].push_back(
            {params.at(handle.layout().params()[i].fqn), dynamic_cast<const FlatParamPart&>(**part).piece()});
      }
    }
    for (const auto& [key, parts] : pieces) {
      const std::vector<at::Tensor> tensors = gather_full(parts, full);
      for (std::size_t k = 0; k < tensors.size(); ++k) states.at(parts[k].param.fqn()).get<Dict>()[key] = tensors[k];
    }
  }
}

// Throws unless all parameters of an optimizer are in `known`.
void check_parameters(const torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& known) {
  std::set<const void*> ours;
  for (const at::Tensor& param : known) ours.insert(param.unsafeGetTensorImpl());
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const std::vector<at::Tensor>& params = optimizer.param_groups()[g].params();
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (ours.count(params[i].unsafeGetTensorImpl()) != 0) continue;
      fail(ErrorCode::invalid_argument,
           "parameter {} of group {} of the optimizer is unknown, expected a parameter of the sharded model: construct "
           "the optimizer from the sharded model's parameters()",
           i, g);
    }
  }
}

// Adds the parameters that only other ranks have to the groups of an optimizer. A collective.
void list_params_of_all(List& param_groups, const ProcessGroup& group) {
  for (Value& param_group : param_groups) {
    std::vector<std::string> mine;
    List& params = param_group.get<Dict>().at("params").get<List>();
    for (const Value& param : params) mine.push_back(param.get<std::string>());
    params = {};
    std::set<std::string> seen;
    for (const std::vector<std::string>& of_rank : all_gather_texts(group, mine)) {
      for (const std::string& name : of_rank) {
        if (seen.insert(name).second) params.push_back(name);
      }
    }
  }
}

// Adds the keys of a parameter's state, which must be equal on all ranks.
void add_keys(const std::string& name, const Value& state, CallArguments& arguments) {
  std::string keys;
  for (const auto& [key, value] : state.get<Dict>()) {
    keys += fmt::format(" {} {}", to_string(key), kind_name(value.kind()));
  }
  arguments.add("state of", name + keys);
}

StateDict state_of(Runtime& runtime, const torch::optim::Optimizer& optimizer) {
  const OptimizedModule optimized(runtime);
  return optimized.to_parameters(local_optimizer_state(optimized.module(), optimizer, optimized.parts()));
}

}  // namespace

void ShardedModule::check_optimizer(const torch::optim::Optimizer& optimizer) const {
  check_parameters(optimizer, parameters());
  state_of(*runtime_, optimizer);
}

StateDict ShardedModule::optim_state_dict(const torch::optim::Optimizer& optimizer, StateDictType type,
                                          const FullStateOptions& full) {
  const c10::NoGradGuard no_grad;
  std::set<std::string> in_units;
  for (const Unit* unit : runtime_->units()) {
    for (const ParamInfo& info : unit->handle()->layout().params()) in_units.insert(info.fqn);
  }
  StateDict state;
  runtime_->check_call(
      "optim_state_dict",
      [&](CallArguments& arguments) {
        runtime_->check_idle("optim_state_dict");
        if (type == StateDictType::local) {
          fail(ErrorCode::unsupported, "optim_state_dict: type is local, expected sharded or full");
        }
        check_parameters(optimizer, parameters());
        state = state_of(*runtime_, optimizer);
        arguments.add("type", type == StateDictType::full ? "full" : "sharded");
        arguments.add("param_groups", state.at("param_groups").get<List>().size());
        if (type != StateDictType::full) return;
        if (full.rank0_only) runtime_->check_no_own_groups("optim_state_dict");
        arguments.add("rank0_only", full.rank0_only);
        for (const auto& [name, of_param] : state.at("state").get<Dict>()) {
          if (!in_units.contains(std::get<std::string>(name))) add_keys(to_string(name), of_param, arguments);
        }
      },
      [&](const Unit& unit, CallArguments& arguments) {
        if (type != StateDictType::full) return;
        for (const ParamInfo& info : unit.handle()->layout().params()) {
          const Value* of_param = state.at("state").get<Dict>().find(info.fqn);
          if (of_param != nullptr) add_keys(info.fqn, *of_param, arguments);
        }
      });
  if (runtime_->has_own_groups()) list_params_of_all(state.at("param_groups").get<List>(), group());
  if (type == StateDictType::sharded) return state;
  make_full(state.at("state").get<Dict>(), sharded_params(*runtime_), sharded_units(*runtime_), full);
  if (full.rank0_only && group().rank() != 0) return {};
  return state;
}

void ShardedModule::load_optim_state_dict(torch::optim::Optimizer& optimizer, const StateDict& state_dict,
                                          const FullStateOptions& full) {
  const c10::NoGradGuard no_grad;
  const OptimizedModule optimized(*runtime_);
  StateDict states;
  const Value *all = state_dict.find("state"), *groups = state_dict.find("param_groups");
  const bool has_state = !full.rank0_only || group().rank() == 0;
  runtime_->check_call("load_optim_state_dict", [&](CallArguments& arguments) {
    runtime_->check_idle("load_optim_state_dict");
    check_parameters(optimizer, parameters());
    if (has_state && (all == nullptr || groups == nullptr || !all->is<Dict>() || !groups->is<List>())) {
      fail(ErrorCode::invalid_argument,
           "the state dict has no 'state' or no 'param_groups', expected a dict and a list");
    }
    arguments.add("rank0_only", full.rank0_only);
  });
  StateDict rest;
  if (has_state) rest["param_groups"] = *groups;
  List group_list;
  Problems problems;
  for_each_entry(rest, group(), full, problems,
                 [&](const std::string&, const Value& value) { group_list = value.get<List>(); });
  const auto take = [&](const std::string& name, const Value& value) {
    if (runtime_->is_of_other_ranks(name)) return;
    const auto param = optimized.params().find(name);
    if (param == optimized.params().end()) {
      states[name] = value;
      return;
    }
    Dict pieces;
    for (const auto& [key, item] : value.get<Dict>()) {
      pieces[key] = is_elementwise(item) ? Value(piece_in(item, param->second)) : item;
    }
    states[name] = std::move(pieces);
  };
  const Dict none;
  for_each_entry(has_state ? all->get<Dict>() : none, group(), full, problems, take);
  set_on_all(*runtime_, "load an optimizer's state", [&](const std::function<void()>& confirm) {
    problems.raise("load an optimizer's state");
    const auto set = plan_optimizer_state(optimized.module(), optimizer, optimized.to_optimized(states, group_list),
                                          optimized.parts());
    confirm();
    set();
  });
}

}  // namespace tessera::fsdp
