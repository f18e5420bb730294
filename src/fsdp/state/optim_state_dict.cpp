// The state of an optimizer of a sharded model by the names of its parameters.

#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

#include <set>

#include "fsdp/runtime/runtime.h"
#include "fsdp/state/sharded_params.h"
#include "tessera/base/error.h"
#include "tessera/state/optimizer_state.h"

namespace tessera::fsdp {

namespace {

// Whether it has an element for each of the parameter's.
bool is_of_elements(const Value& value) {
  const auto* tensor = value.get_if<at::Tensor>();
  return value.is_any_tensor() && !(tensor != nullptr && tensor->dim() == 0);
}

// What an optimizer works on, by names for get_optimizer_state_dict: with use_orig_params the model itself, else a
// module that has the flat parameters and what isn't in one.
class OptimizedModule {
 public:
  explicit OptimizedModule(const Runtime& runtime)
      : params_(sharded_params(runtime)), parts_(unsharded_parts(runtime)) {
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
  // Of those that aren't in there.
  const ParameterParts& parts() const { return parts_; }

  // The state by the names of parameters, where what is cut is this rank's piece of it: a FlatParamPart.
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

  // The reverse: `states` of parameters, pieces where they are cut, as the optimizer has them.
  StateDict to_optimized(const Dict& states, const List& groups) const {
    StateDict result{{"state", Dict()}, {"param_groups", List()}};
    Dict& optimized = result.at("state").get<Dict>();
    std::map<std::string, std::string> names;  // of the optimizer's, by the parameter's
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
      std::set<std::string> there;
      for (const Value& param : group.get<Dict>().at("params").get<List>()) {
        const auto& fqn = param.get<std::string>();
        const auto found = names.find(fqn);
        const std::string& name = found == names.end() ? fqn : found->second;
        if (there.insert(name).second) params.push_back(name);
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

  // `state` with what `part_of` makes of its tensors, which have `numel` elements each.
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
             "the optimizer's {} of '{}' is {}, expected the {} elements that this rank has: make the optimizer after "
             "the model was sharded, of its parameters()",
             to_string(key), printable(fqn), shape_to_string(tensor->sizes().vec()), numel);
      }
      parts[key] = part_of(*tensor);
    }
    return parts;
  }

  // Of pieces of a unit's parameters, one for the flat parameter.
  Dict flat_state_of(const FlatParamHandle& handle, const Dict& states) const {
    Dict flat;
    for (std::size_t i = 0; i < handle.params().size(); ++i) {
      const Value* state = states.find(handle.layout().params()[i].fqn);
      if (state == nullptr) continue;
      for (const auto& [key, value] : state->get<Dict>()) {
        if (!is_of_elements(value)) {
          flat[key] = value;
          continue;
        }
        const bool is_cut = is_sharded(handle.options().strategy);
        const at::Tensor piece = is_cut ? value.get<at::Tensor>() : local_tensor(handle, i, key, value);
        if (!flat.contains(key)) {
          flat[key] =
              at::zeros({handle.layout().sharded_numel()}, piece.options().device(handle.flat_param().device()));
        }
        const at::Tensor& whole = flat.at(key).get<at::Tensor>();
        const at::Tensor to = is_cut ? handle.piece_of(whole, i) : handle.unflatten_as(whole)[i];
        to.copy_(piece);
      }
    }
    return flat;
  }

  at::Tensor local_tensor(const FlatParamHandle& handle, std::size_t i, const Key& key, const Value& value) const {
    const at::Tensor& param = handle.params()[i];
    if (const std::optional<at::Tensor> local = parts_.from_state(param, value)) return *local;
    fail(ErrorCode::invalid_argument, "{} of '{}' is {}, expected a tensor {}", to_string(key),
         printable(handle.layout().params()[i].fqn), to_string(value, 60), shape_to_string(parts_.size_of(param)));
  }

  ShardedParams params_;
  ParameterParts parts_;
  std::shared_ptr<torch::nn::Module> module_;
  std::map<std::string, FlatParamHandle*> flat_;  // by their names in module_
  std::map<std::string, std::string> others_;     // names in the model, by those in module_
};

// Puts whole tensors in the place of parts.
void make_full(Dict& states, const ShardedParams& params, const std::vector<Unit*>& units,
               const FullStateOptions& full) {
  for (const auto& [name, state] : Dict(states)) {
    if (params.count(std::get<std::string>(name)) != 0) continue;
    for (const auto& [key, value] : state.get<Dict>()) {
      if (value.is_any_tensor()) states.at(name).get<Dict>()[key] = whole_of(value);
    }
  }
  if (params.empty()) return;
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
      const std::vector<at::Tensor> whole = put_together(parts, full);
      for (std::size_t k = 0; k < whole.size(); ++k) states.at(parts[k].param.fqn()).get<Dict>()[key] = whole[k];
    }
  }
}

// That an optimizer works on `known` and nothing else.
void check_parameters(const torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& known) {
  std::set<const void*> ours;
  for (const at::Tensor& param : known) ours.insert(param.unsafeGetTensorImpl());
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const std::vector<at::Tensor>& params = optimizer.param_groups()[g].params();
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (ours.count(params[i].unsafeGetTensorImpl()) != 0) continue;
      fail(ErrorCode::invalid_argument,
           "parameter {} of group {} of the optimizer is none of the sharded model's: make the optimizer after the "
           "model was sharded, of its parameters()",
           i, g);
    }
  }
}

StateDict state_of(Runtime& runtime, const torch::optim::Optimizer& optimizer) {
  const OptimizedModule optimized(runtime);
  return optimized.to_parameters(get_optimizer_state_dict(optimized.module(), optimizer, optimized.parts()));
}

}  // namespace

void ShardedModule::check_optimizer(const torch::optim::Optimizer& optimizer) const {
  check_parameters(optimizer, parameters());
  state_of(*runtime_, optimizer);
}

StateDict ShardedModule::optim_state_dict(const torch::optim::Optimizer& optimizer, StateDictType type,
                                          const FullStateOptions& full) {
  runtime_->check_idle("optim_state_dict was called");
  if (type == StateDictType::local) {
    fail(ErrorCode::unsupported, "optim_state_dict: local, expected sharded or full");
  }
  const c10::NoGradGuard no_grad;
  StateDict state = group().agree_on("get an optimizer's state", [&] {
    check_parameters(optimizer, parameters());
    return state_of(*runtime_, optimizer);
  });
  if (type == StateDictType::sharded) return state;
  make_full(state.at("state").get<Dict>(), sharded_params(*runtime_), runtime_->units(), full);
  if (full.rank0_only && group().rank() != 0) return {};
  return state;
}

void ShardedModule::load_optim_state_dict(torch::optim::Optimizer& optimizer, const StateDict& state_dict,
                                          const FullStateOptions& full) {
  runtime_->check_idle("load_optim_state_dict was called");
  const c10::NoGradGuard no_grad;
  const OptimizedModule optimized(*runtime_);
  StateDict states;
  const Value *all = state_dict.find("state"), *groups = state_dict.find("param_groups");
  const bool brings = !full.rank0_only || group().rank() == 0;
  group().agree_on("load an optimizer's state", [&] {
    check_parameters(optimizer, parameters());
    if (brings && (all == nullptr || groups == nullptr || !all->is<Dict>() || !groups->is<List>())) {
      fail(ErrorCode::invalid_argument, "an optimizer's state dict has no 'state' and 'param_groups'");
    }
  });
  StateDict rest;
  if (brings) rest["param_groups"] = *groups;
  List group_list;
  Problems problems;
  for_each_entry(rest, group(), full, problems,
                 [&](const std::string&, const Value& value) { group_list = value.get<List>(); });
  const auto take = [&](const std::string& name, const Value& value) {
    const auto param = optimized.params().find(name);
    if (param == optimized.params().end()) {
      states[name] = value;
      return;
    }
    Dict pieces;
    for (const auto& [key, item] : value.get<Dict>()) {
      pieces[key] = is_of_elements(item) ? Value(piece_in(item, param->second)) : item;
    }
    states[name] = std::move(pieces);
  };
  const Dict nothing;
  for_each_entry(brings ? all->get<Dict>() : nothing, group(), full, problems, take);
  set_on_all(group(), "load an optimizer's state", [&](const std::function<void()>& confirm) {
    problems.raise("load an optimizer's state");
    OptimizerStateOptions options;
    options.confirm = confirm;
    set_optimizer_state_dict(optimized.module(), optimizer, optimized.to_optimized(states, group_list), options,
                             optimized.parts());
  });
}

}  // namespace tessera::fsdp
