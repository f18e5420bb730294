#include "tessera/state/flatten.h"

#include "tessera/base/error.h"

namespace tessera {

FlatStateDict flatten_state_dict(const StateDict& state_dict, TraversalRules rules) {
  FlatStateDict flat;
  traverse_state_dict(
      state_dict,
      [&](const Path& path, const Value& value) {
        std::string name = flat_name(path);
        if (!flat.mapping.emplace(name, path).second) {
          fail(ErrorCode::invalid_argument, "flatten state dict: two values have the name '{}', expected unique names",
               printable(name));
        }
        flat.state_dict.insert_or_assign(name, value);
      },
      rules);
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
