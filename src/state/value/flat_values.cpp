#include "state/flat_values.h"

#include <utility>

#include "tessera/base/error.h"
#include "tessera/state/flatten_sharded_tensors.h"

namespace tessera {

void for_each_flat_value(const StateDict& state, const Flattening& how, const ProcessGroup& group, FlatVisitor visit) {
  const auto visit_flattened = [&](const Path& path, const Value& value) {
    std::string name = flat_name(path);
    if (!how.sharded_tensors || !value.is<NestedShardedTensor>()) return visit(std::move(name), path, value);
    const StateDict flattened = flatten_sharded_tensors({{name, value}}, group);
    if (!flattened.empty()) visit(std::move(name), path, flattened.begin()->value);
  };
  if (how.state_dict) return traverse_state_dict(state, visit_flattened, how.rules);
  for (const auto& [key, value] : state) visit_flattened({flat_name({key})}, value);
}

void refuse_same_name(std::string_view name) {
  fail(ErrorCode::invalid_argument, "flatten state dict: two values have the name '{}', expected unique names",
       printable(name));
}

}  // namespace tessera
