#include "tessera/state/flatten.h"

#include <utility>

#include "state/flat_values.h"
#include "tessera/base/error.h"

namespace tessera {

FlatStateDict flatten_state_dict(const StateDict& state_dict, TraversalRules rules) {
  FlatStateDict flat;
  for_each_flat_value(state_dict, {.rules = rules}, {}, [&](std::string name, const Path& path, const Value& value) {
    if (flat.state_dict.contains(name)) refuse_same_name(name);
    flat.state_dict.insert_or_assign(name, value);
    flat.mapping.emplace(std::move(name), path);
  });
  return flat;
}

StateDict unflatten_state_dict(const StateDict& state_dict, const FlattenMapping& mapping) {
  StateDict nested;
  for (const auto& [key, value] : state_dict) {
    const auto* name = std::get_if<std::string>(&key);
    const auto found = name ? mapping.find(*name) : mapping.end();
    if (found == mapping.end()) {
      fail(ErrorCode::not_found, "unflatten state dict: no path for {}, expected one in the mapping",
           printable(to_string(key)));
    }
    set_element(nested, found->second, value);
  }
  return nested;
}

}  // namespace tessera
