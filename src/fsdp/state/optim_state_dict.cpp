// State dicts of an optimizer of a sharded model.

#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

#include <set>

#include "fsdp/groups.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/state/optimized_module.h"
#include "fsdp/state/values.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/state/internal/local_state_dict.h"

namespace tessera::fsdp {

namespace {

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
    for (const Value& param : params) {
      if (const auto* name = param.get_if<std::string>()) mine.push_back(*name);
    }
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

StateDict state_of(const Runtime& runtime, const torch::optim::Optimizer& optimizer) {
  const OptimizedModule optimized(runtime);
  return optimized.to_parameters(local_optimizer_state(optimized.module(), optimizer, optimized.parts()));
}

// Throws Error(invalid_argument) unless a state dict has the form of one that optim_state_dict returns.
void check_form(const StateDict& state_dict) {
  const Value *states = state_dict.find("state"), *groups = state_dict.find("param_groups");
  bool fits = states != nullptr && states->is<Dict>() && (groups == nullptr || groups->is<List>());
  if (fits && groups != nullptr) {
    for (const Value& group : groups->get<List>()) {
      const Value* params = group.is<Dict>() ? group.get<Dict>().find("params") : nullptr;
      fits = fits && params != nullptr && params->is<List>();
    }
  }
  if (fits) return;
  fail(ErrorCode::invalid_argument,
       "the state dict is {}, expected a dict 'state' and, if there are 'param_groups', a list of dicts with 'params'",
       to_string(state_dict, 80));
}

void note_dtensors(Dict& states, GatheredDTensors& dtensors) {
  for (const auto& [name, of_param] : Dict(states)) {
    const auto* text = std::get_if<std::string>(&name);
    Dict* state = states.at(name).get_if<Dict>();
    if (text == nullptr || state == nullptr) continue;
    for (const auto& [key, value] : *state) dtensors.add(*text, to_string(key), state->at(key));
  }
}

// Replaces the values of sharded parameters by parts; returns which had another shape or form.
Problems to_parts(Dict& states, const Runtime& runtime, const ShardedParams& params) {
  Problems problems;
  for (const auto& [key, of_param] : Dict(states)) {
    const auto* name = std::get_if<std::string>(&key);
    try {
      if (name == nullptr) fail(ErrorCode::invalid_argument, "key {} is an int, expected a string", to_string(key));
      if (runtime.is_of_other_ranks(*name)) {
        states.erase(key);
        continue;
      }
      const auto param = params.find(*name);
      if (param == params.end()) continue;
      for (const auto& [state_key, value] : of_param.get<Dict>()) {
        if (!is_elementwise(state_key, value, param->second.size())) continue;
        states.at(key).get<Dict>()[state_key] = param->second.part(piece_in(value, param->second));
      }
    } catch (const Error& error) {
      problems.add("wrong", error.what());
    }
  }
  return problems;
}

// Gives the values of a state of parts their form. A collective if it is full or on a mesh.
void set_form(Dict& states, const Runtime& runtime, const ShardedParams& params, StateDictType type,
              const StateOptions& options) {
  for (const auto& [name, state] : Dict(states)) {
    if (params.count(std::get<std::string>(name)) != 0) continue;
    for (const auto& [key, value] : state.get<Dict>()) {
      if (value.is_any_tensor())
        states.at(name).get<Dict>()[key] = value_of_unsharded(value, type, options, /*copies=*/true);
    }
  }
  for (const Unit* unit : sharded_units(runtime)) {
    const FlatParamHandle& handle = *unit->handle();
    std::map<std::string, std::vector<Piece>> pieces;  // by the key of the state
    for (const ParamInfo& info : handle.layout().params()) {
      const Value* state = states.find(info.fqn);
      if (state == nullptr) continue;
      for (const auto& [key, value] : state->get<Dict>()) {
        const auto* part = value.get_if<std::shared_ptr<Checkpointable>>();
        if (part == nullptr) continue;
        pieces[std::get<std::string>(key)].push_back(
            {params.at(info.fqn), dynamic_cast<const FlatParamPart&>(**part).piece()});
      }
    }
    for (const auto& [key, parts] : pieces) {
      const std::vector<Value> values = values_of(parts, type, options, runtime.group());
      for (std::size_t k = 0; k < values.size(); ++k) states.at(parts[k].param.fqn()).get<Dict>()[key] = values[k];
    }
  }
}

// Returns the state that `get` returns in another form. With `has_other_forms` its values may have any form, otherwise
// those of sharded parameters are parts. A collective.
StateDict in_form(Runtime& runtime, StateDictType type, const StateOptions& options, bool has_other_forms,
                  FunctionRef<StateDict()> get) {
  const c10::NoGradGuard no_grad;
  const ShardedParams params = sharded_params(runtime);
  std::set<std::string> in_units;
  for (const Unit* unit : runtime.units()) {
    for (const ParamInfo& info : unit->handle()->layout().params()) in_units.insert(info.fqn);
  }
  GatheredDTensors dtensors(runtime, params);
  StateDict state;
  const bool is_full = type == StateDictType::full, gathers = is_full || options.mesh;
  runtime.check_call(
      "optim_state_dict",
      [&](CallArguments& arguments) {
        runtime.check_idle("optim_state_dict");
        if (type == StateDictType::local) {
          fail(ErrorCode::unsupported, "optim_state_dict: type is local, expected sharded or full");
        }
        if (is_full && options.rank0_only) runtime.check_has_all_params("optim_state_dict");
        if (!is_full && options.mesh) check_mesh(runtime, *options.mesh);
        state = get();
        Dict& states = state.at("state").get<Dict>();
        for (const auto& [name, of_param] : states) {
          if (!of_param.is<Dict>()) {
            fail(ErrorCode::invalid_argument, "the state of {} is {}, expected a dict", to_string(name),
                 to_string(of_param, 60));
          }
        }
        if (has_other_forms) note_dtensors(states, dtensors);
        arguments.add("type", is_full ? "full" : "sharded").add("is another's form", has_other_forms);
        const Value* groups = state.find("param_groups");
        arguments.add("param_groups", groups == nullptr ? 0 : groups->get<List>().size());
        if (is_full) arguments.add("rank0_only", options.rank0_only);
        if (!is_full && options.mesh) arguments.add("mesh", options.mesh->to_string());
        dtensors.describe(arguments);
        if (!gathers) return;
        for (const auto& [name, of_param] : states) {
          const auto* text = std::get_if<std::string>(&name);
          if (text == nullptr || !in_units.contains(*text)) add_keys(to_string(name), of_param, arguments);
        }
      },
      [&](const Unit& unit, CallArguments& arguments) {
        dtensors.describe(unit, arguments);
        if (!gathers) return;
        for (const ParamInfo& info : unit.handle()->layout().params()) {
          const Value* of_param = state.at("state").get<Dict>().find(info.fqn);
          if (of_param != nullptr) add_keys(info.fqn, *of_param, arguments);
        }
      });
  Dict& states = state.at("state").get<Dict>();
  if (has_other_forms) {
    dtensors.gather();
    agree_on(runtime.groups(), "optim_state_dict",
             [&] { to_parts(states, runtime, params).raise("optim_state_dict"); });
  }
  if (runtime.has_own_groups() && state.contains("param_groups")) {
    list_params_of_all(state.at("param_groups").get<List>(), runtime.group());
  }
  set_form(states, runtime, params, type, options);
  if (is_full && options.rank0_only && runtime.group().rank() != 0) return {};
  return state;
}

}  // namespace

void ShardedModule::check_optimizer(const torch::optim::Optimizer& optimizer) const {
  check_parameters(optimizer, parameters());
  state_of(runtime(), optimizer);
}

StateDict ShardedModule::optim_state_dict(const torch::optim::Optimizer& optimizer, StateDictType type,
                                          const StateOptions& options) {
  return in_form(runtime(), type, options, /*has_other_forms=*/false, [&] {
    check_parameters(optimizer, parameters());
    return state_of(runtime(), optimizer);
  });
}

StateDict ShardedModule::optim_state_dict(const StateDict& state_dict, StateDictType type,
                                          const StateOptions& options) {
  return in_form(runtime(), type, options, /*has_other_forms=*/true, [&] {
    check_form(state_dict);
    return state_dict;
  });
}

void ShardedModule::load_optim_state_dict(torch::optim::Optimizer& optimizer, const StateDict& state_dict,
                                          const StateOptions& options, bool strict) {
  const c10::NoGradGuard no_grad;
  const OptimizedModule optimized(runtime());
  GatheredDTensors dtensors(runtime(), optimized.params());
  StateDict given;
  Dict states;
  const bool has_state = !options.rank0_only || group().rank() == 0;
  runtime().check_call(
      "load_optim_state_dict",
      [&](CallArguments& arguments) {
        runtime().check_idle("load_optim_state_dict");
        check_parameters(optimizer, parameters());
        arguments.add("rank0_only", options.rank0_only).add("strict", strict);
        if (!has_state) return;
        check_form(state_dict);
        given = rekey_optim_state_dict(state_dict, OptimStateKeyType::param_name, *module_ptr(),
                                       this->options().use_orig_params ? &optimizer : nullptr);
        if (options.rank0_only) return;
        arguments.add("param_groups", given.contains("param_groups"));
        note_dtensors(given.at("state").get<Dict>(), dtensors);
        dtensors.describe(arguments);
      },
      [&](const Unit& unit, CallArguments& arguments) { dtensors.describe(unit, arguments); });
  dtensors.gather();
  StateDict rest;
  if (given.contains("param_groups")) rest["param_groups"] = given.at("param_groups");
  std::optional<List> groups;
  Problems problems;
  for_each_entry(rest, group(), options, problems,
                 [&](const std::string&, const Value& value) { groups = value.get<List>(); });
  const auto take = [&](const std::string& name, const Value& value) {
    if (runtime().is_of_other_ranks(name)) return;
    const auto param = optimized.params().find(name);
    if (param == optimized.params().end()) {
      states[name] = value;
      return;
    }
    Dict pieces;
    for (const auto& [key, item] : value.get<Dict>()) {
      const bool is_piece = is_elementwise(key, item, param->second.size());
      pieces[key] = is_piece ? Value(piece_in(item, param->second)) : item;
    }
    states[name] = std::move(pieces);
  };
  const Dict none;
  for_each_entry(has_state ? given.at("state").get<Dict>() : none, group(), options, problems, take);
  set_on_all(runtime(), "load an optimizer's state", [&](FunctionRef<void()> confirm) {
    if (!groups) groups = state_of(runtime(), optimizer).at("param_groups").get<List>();
    problems.raise("load an optimizer's state");
    const StateDict of_module = optimized.to_optimized(states, *groups, strict, problems);
    problems.raise("load an optimizer's state");
    StateDictOptions state_options;
    state_options.strict = strict;
    const auto set = plan_optimizer_state(optimized.module(), optimizer, of_module, optimized.parts(), state_options);
    confirm();
    set();
  });
}

}  // namespace tessera::fsdp
