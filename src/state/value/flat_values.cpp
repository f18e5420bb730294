#include "state/flat_values.h"

#include <string_view>
#include <unordered_set>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/state/flatten_sharded_tensors.h"

namespace tessera {

std::vector<FlatValue> flat_values(const StateDict& state, TraversalRules rules) {
  std::vector<FlatValue> values;
  traverse_state_dict(
      state,
      [&](const Path& path, const Value& value) {
        values.push_back({flat_name(path), path, value});
      },
      rules);
  std::unordered_set<std::string_view> names;
  names.reserve(values.size());
  for (const FlatValue& one : values) {
    if (names.insert(one.name).second) continue;
    fail(ErrorCode::invalid_argument, "flatten state dict: two values have the name '{}', expected unique names",
         printable(one.name));
  }
  return values;
}

std::vector<FlatValue> outermost_values(const StateDict& state) {
  std::vector<FlatValue> values;
  values.reserve(state.size());
  for (const auto& [key, value] : state) {
    std::string name = flat_name({key});
    Path path{name};
    values.push_back({std::move(name), std::move(path), value});
  }
  return values;
}

void flatten_nested(std::vector<FlatValue>& values, const ProcessGroup& group) {
  std::erase_if(values, [&](FlatValue& one) {
    if (!one.value.is<NestedShardedTensor>()) return false;
    const StateDict flattened = flatten_sharded_tensors({{one.name, one.value}}, group);
    if (flattened.empty()) return true;
    one.value = flattened.begin()->value;
    return false;
  });
}

}  // namespace tessera
