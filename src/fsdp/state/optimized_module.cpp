#include "fsdp/state/optimized_module.h"

#include <ATen/ops/zeros.h>

#include <set>
#include <utility>

#include "fsdp/runtime/runtime.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"

namespace tessera::fsdp {

namespace {

// Returns `state` with `part_of` applied to its tensors, which must be one-dimensional with `numel` elements.
Dict with_parts(const Dict& state, const std::string& fqn, std::int64_t numel,
                FunctionRef<Value(const at::Tensor&)> part_of) {
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

}  // namespace

bool is_elementwise(const Key& key, const Value& value, const std::vector<std::int64_t>& size) {
  const auto* tensor = value.get_if<at::Tensor>();
  if (tensor == nullptr || tensor->dim() != 0) return value.is_any_tensor();
  return size.empty() && key != Key("step");  // a counter has no dimensions either
}

OptimizedModule::OptimizedModule(const Runtime& runtime)
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

StateDict OptimizedModule::to_parameters(const StateDict& optimized) const {
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

StateDict OptimizedModule::to_optimized(const Dict& states, const List& groups, bool strict, Problems& problems) const {
  StateDict result{{"state", Dict()}, {"param_groups", List()}};
  Dict& optimized = result.at("state").get<Dict>();
  std::map<std::string, std::string> names;  // names in module(), by names in the model
  for (const auto& [flat_name, handle] : flat_) {
    for (const ParamInfo& info : handle->layout().params()) names[info.fqn] = flat_name;
    Dict flat = flat_state_of(*handle, states, strict, problems);
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

const std::string& OptimizedModule::name_of_other(const std::string& name) const {
  const auto found = others_.find(name);
  return found == others_.end() ? name : found->second;
}

// Assembles the state of a flat parameter from those of its parameters.
Dict OptimizedModule::flat_state_of(const FlatParamHandle& handle, const Dict& states, bool strict,
                                    Problems& problems) const {
  Dict flat;
  std::vector<std::string> missing;
  for (std::size_t i = 0; i < handle.params().size(); ++i) {
    const Value* state = states.find(handle.layout().params()[i].fqn);
    if (state == nullptr || state->get<Dict>().empty()) {
      missing.push_back(handle.layout().params()[i].fqn);
      continue;
    }
    for (const auto& [key, value] : state->get<Dict>()) {
      if (!is_elementwise(key, value, handle.layout().params()[i].shape)) {
        flat[key] = value;
        continue;
      }
      const bool has_pieces = is_sharded(handle.options().strategy);
      const at::Tensor piece = has_pieces ? value.get<at::Tensor>() : local_tensor(handle, i, key, value);
      if (!flat.contains(key)) {
        flat[key] = at::zeros({handle.layout().sharded_numel()}, piece.options().device(handle.flat_param().device()));
      }
      const at::Tensor& shard = flat.at(key).get<at::Tensor>();
      const at::Tensor to = has_pieces ? handle.piece_of(shard, i) : handle.unflatten_as(shard)[i];
      to.copy_(piece);
    }
  }
  if (strict && !flat.empty()) {
    for (const std::string& name : missing) {
      problems.add("missing", fmt::format("the state of parameter '{}'", printable(name)));
    }
  }
  return flat;
}

at::Tensor OptimizedModule::local_tensor(const FlatParamHandle& handle, std::size_t i, const Key& key,
                                         const Value& value) const {
  const at::Tensor& param = handle.params()[i];
  if (const std::optional<at::Tensor> local = parts_.from_state(param, value)) return *local;
  fail(ErrorCode::invalid_argument, "{} of '{}' is {}, expected a tensor of shape {}", to_string(key),
       printable(handle.layout().params()[i].fqn), to_string(value, 60), shape_to_string(parts_.size_of(param)));
}

}  // namespace tessera::fsdp
