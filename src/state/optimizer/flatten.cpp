#include "state/optimizer/flatten.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "state/optimizer/libtorch_optim.h"
#include "tessera/base/error.h"

namespace tessera {

namespace {

constexpr std::string_view kState = "state.", kGroups = "param_groups.";

// A key without its section: "layer.weight.lr" is the key "lr" of "layer.weight".
struct FlatKey {
  std::string parameter, key;
};

std::optional<FlatKey> split(const Key& key, std::string_view section) {
  const auto* text = std::get_if<std::string>(&key);
  if (text == nullptr || !text->starts_with(section)) return std::nullopt;
  const std::size_t dot = text->rfind('.');
  if (dot < section.size()) return std::nullopt;
  return FlatKey{text->substr(section.size(), dot - section.size()), text->substr(dot + 1)};
}

// Returns the entries of a section, by parameter.
std::map<std::string, Dict> section_of(const StateDict& flat, std::string_view section) {
  std::map<std::string, Dict> entries;
  for (const auto& [key, value] : flat) {
    if (const auto found = split(key, section)) entries[found->parameter].insert_or_assign(found->key, value);
  }
  return entries;
}

Dict unflatten_group(const std::map<std::string, Dict>& options, const ParameterNames& names,
                     const std::vector<at::Tensor>& parameters, std::size_t g) {
  Dict group;
  List found_names;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const std::vector<std::string>& all = names.of(parameters[i], g, i);
    const auto name = std::find_if(all.begin(), all.end(), [&](const auto& n) { return options.contains(n); });
    if (name == all.end()) continue;
    const Dict& own = options.at(*name);
    if (!found_names.empty() && own != group) {
      fail(ErrorCode::invalid_argument,
           "load optimizer state dict: parameters '{}' and '{}' of group {} have different options in the flattened "
           "state, expected equal ones",
           printable(found_names[0].get<std::string>()), printable(*name), g);
    }
    group = own;
    found_names.push_back(*name);
  }
  group["params"] = std::move(found_names);
  return group;
}

}  // namespace

StateDict flatten_optimizer_state(const StateDict& nested) {
  StateDict flat;
  for (const auto& [parameter, state] : nested.at("state").get<Dict>()) {
    for (const auto& [key, value] : state.get<Dict>()) {
      const std::string name =
          fmt::format("{}{}.{}", kState, std::get<std::string>(parameter), std::get<std::string>(key));
      if (!value.is_any_tensor() && !value.is<std::int64_t>() && !value.is<double>()) {
        fail(ErrorCode::unsupported, "flatten optimizer state dict: '{}' is {}, expected a tensor or a number",
             printable(name), kind_name(value.kind()));
      }
      flat.insert_or_assign(name, value);
    }
  }
  for (const Value& group : nested.at("param_groups").get<List>()) {
    for (const Value& parameter : group.get<Dict>().at("params").get<List>()) {
      for (const auto& [key, value] : group.get<Dict>()) {
        if (key == Key("params")) continue;
        flat.insert_or_assign(fmt::format("{}{}.{}", kGroups, parameter.get<std::string>(), std::get<std::string>(key)),
                              value);
      }
    }
  }
  return flat;
}

bool is_flattened(const StateDict& state_dict, const torch::optim::Optimizer& optimizer) {
  if (!state_dict.empty()) return !state_dict.contains("state") && !state_dict.contains("param_groups");
  const auto& groups = optimizer.param_groups();
  return std::all_of(groups.begin(), groups.end(), [](const auto& group) { return group.params().empty(); });
}

StateDict unflatten_optimizer_state(const StateDict& flat, const ParameterNames& names,
                                    const torch::optim::Optimizer& optimizer) {
  Dict states;
  for (auto& [parameter, state] : section_of(flat, kState)) states[parameter] = std::move(state);
  const std::map<std::string, Dict> options = section_of(flat, kGroups);
  List groups;
  std::set<std::string> own;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    Dict group = unflatten_group(options, names, optimizer.param_groups()[g].params(), g);
    for (const Value& name : group.at("params").get<List>()) own.insert(name.get<std::string>());
    groups.push_back(std::move(group));
  }
  List others;
  for (const auto& [name, own_options] : options) {
    if (!own.contains(name)) others.push_back(name);
  }
  if (!others.empty()) groups.push_back(Dict{{"params", std::move(others)}});
  return {{"state", std::move(states)}, {"param_groups", std::move(groups)}};
}

std::optional<std::string> parameter_of_flat_state(const Key& key) {
  if (auto found = split(key, kState)) return std::move(found->parameter);
  return std::nullopt;
}

}  // namespace tessera
