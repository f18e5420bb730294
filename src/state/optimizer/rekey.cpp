// Names and numbers of parameters in an optimizer's state dict.

#include <torch/optim/optimizer.h>

#include <map>
#include <optional>
#include <set>
#include <variant>

#include "state/parameter_names.h"
#include "tessera/state/optimizer_state.h"
#include "tessera/state/traverse.h"

namespace tessera {

namespace {

constexpr std::string_view kRekey = "rekey an optimizer's state dict";

// The parameters that numbers count.
class NumberedParameters {
 public:
  NumberedParameters(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer) {
    const ParameterNames names(module);
    std::set<const void*> seen;
    const auto add = [&](const at::Tensor& param, std::size_t group, std::size_t position) {
      if (!seen.insert(param.unsafeGetTensorImpl()).second) return;
      const std::vector<std::string>& of_param = names.of(param, group, position);
      for (const std::string& name : of_param) numbers_[name] = static_cast<std::int64_t>(names_.size());
      names_.push_back(of_param.front());
    };
    if (optimizer == nullptr) {
      const std::vector<at::Tensor> params = module.parameters();
      for (std::size_t i = 0; i < params.size(); ++i) {
        if (params[i].defined()) add(params[i], 0, i);
      }
      return;
    }
    for (std::size_t g = 0; g < optimizer->param_groups().size(); ++g) {
      const std::vector<at::Tensor>& params = optimizer->param_groups()[g].params();
      for (std::size_t i = 0; i < params.size(); ++i) add(params[i], g, i);
    }
  }

  std::size_t size() const { return names_.size(); }
  // Returns the number of a named parameter, or the first name of a numbered one.
  Key other_key(const Key& key) const {
    if (const auto* name = std::get_if<std::string>(&key)) {
      const auto found = numbers_.find(*name);
      if (found != numbers_.end()) return found->second;
      fail(ErrorCode::invalid_argument, "{}: no parameter is called '{}', expected a name of one", kRekey,
           printable(*name));
    }
    const std::int64_t number = std::get<std::int64_t>(key);
    if (number >= 0 && number < static_cast<std::int64_t>(size())) return names_[static_cast<std::size_t>(number)];
    fail(ErrorCode::invalid_argument, "{}: a parameter has number {}, expected 0 to {}", kRekey, number,
         static_cast<std::int64_t>(size()) - 1);
  }

 private:
  std::vector<std::string> names_;  // the first of each parameter
  std::map<std::string, std::int64_t> numbers_;
};

Key key_in(const Value& param) {
  if (const auto* name = param.get_if<std::string>()) return *name;
  if (const auto* number = param.get_if<std::int64_t>()) return *number;
  fail(ErrorCode::invalid_argument, "{}: a parameter of a group is {}, expected a name or a number", kRekey,
       to_string(param, 60));
}

List params_of(const List& groups, std::size_t g) {
  const Value* params = groups[g].get<Dict>().find("params");
  if (params != nullptr && params->is<List>()) return params->get<List>();
  fail(ErrorCode::invalid_argument, "{}: group {} has no 'params', expected a list", kRekey, g);
}

// Returns whether the keys of a state dict are names; nothing if it has no keys.
std::optional<bool> has_names(const Dict& states, const List& groups) {
  std::optional<bool> found;
  const auto see = [&](const Key& key) {
    const bool is_name = std::holds_alternative<std::string>(key);
    if (found.value_or(is_name) != is_name) {
      fail(ErrorCode::invalid_argument, "{}: found both names and numbers of parameters, expected one of them", kRekey);
    }
    found = is_name;
  };
  for (const auto& [key, state] : states) see(key);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const Value& param : params_of(groups, g)) see(key_in(param));
  }
  return found;
}

}  // namespace

StateDict rekey_optim_state_dict(const StateDict& state_dict, OptimStateKeyType type, const torch::nn::Module& module,
                                 const torch::optim::Optimizer* optimizer) {
  const Dict& states = require_element<Dict>(state_dict, {"state"});
  List groups;
  if (state_dict.contains("param_groups")) groups = require_element<List>(state_dict, {"param_groups"});
  const std::optional<bool> names = has_names(states, groups);
  if (!names || *names == (type == OptimStateKeyType::param_name)) return state_dict;

  const NumberedParameters parameters(module, optimizer);
  const auto rekeyed = [&](const Key& key, std::set<Key>& seen) {
    Key now = parameters.other_key(key);
    if (seen.insert(now).second) return now;
    fail(ErrorCode::invalid_argument, "{}: two keys are of parameter {}, expected one", kRekey, to_string(now));
  };
  StateDict result = state_dict;
  std::set<Key> with_state, listed;
  Dict rekeyed_states;
  for (const auto& [key, state] : states) rekeyed_states[rekeyed(key, with_state)] = state;
  result["state"] = std::move(rekeyed_states);
  if (groups.empty()) return result;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    List params;
    for (const Value& param : params_of(groups, g)) {
      const Key now = rekeyed(key_in(param), listed);
      std::visit([&](const auto& name_or_number) { params.push_back(name_or_number); }, now);
    }
    groups[g].get<Dict>()["params"] = std::move(params);
  }
  if (!*names && listed.size() != parameters.size()) {
    fail(ErrorCode::invalid_argument, "{}: its groups have {} parameters, expected {}, those of the {}", kRekey,
         listed.size(), parameters.size(), optimizer == nullptr ? "module" : "optimizer");
  }
  result["param_groups"] = std::move(groups);
  return result;
}

}  // namespace tessera
