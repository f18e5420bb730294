#include "state/map_tensors.h"

#include <utility>

namespace tessera {

namespace {

using Map = FunctionRef<Value(const Path& path, const Value& tensor)>;

Value mapped(const Value& value, Path& path, Map f);

template <typename Sequence>
Sequence mapped_items(const Sequence& items, Path& path, Map f) {
  Sequence result;
  for (std::size_t i = 0; i < items.size(); ++i) {
    path.emplace_back(static_cast<std::int64_t>(i));
    result.push_back(mapped(items[i], path, f));
    path.pop_back();
  }
  return result;
}

Dict mapped_entries(const Dict& dict, Path& path, Map f) {
  Dict result;
  for (const auto& [key, value] : dict) {
    path.push_back(key);
    result.insert_or_assign(key, mapped(value, path, f));
    path.pop_back();
  }
  return result;
}

Value mapped(const Value& value, Path& path, Map f) {
  if (value.is_any_tensor()) return f(path, value);
  if (const auto* dict = value.get_if<Dict>()) return mapped_entries(*dict, path, f);
  if (const auto* list = value.get_if<List>()) return mapped_items(*list, path, f);
  if (const auto* tuple = value.get_if<Tuple>()) return mapped_items(*tuple, path, f);
  return value;
}

void visit_tensors(const Value& value, Path& path, FunctionRef<void(const Path& path, const Value& tensor)> f) {
  const auto visit_items = [&](const auto& items) {
    for (std::size_t i = 0; i < items.size(); ++i) {
      path.emplace_back(static_cast<std::int64_t>(i));
      visit_tensors(items[i], path, f);
      path.pop_back();
    }
  };
  if (value.is_any_tensor()) return f(path, value);
  if (const auto* list = value.get_if<List>()) return visit_items(*list);
  if (const auto* tuple = value.get_if<Tuple>()) return visit_items(*tuple);
  const auto* dict = value.get_if<Dict>();
  if (dict == nullptr) return;
  for (const auto& [key, item] : *dict) {
    path.push_back(key);
    visit_tensors(item, path, f);
    path.pop_back();
  }
}

}  // namespace

void for_each_tensor(const StateDict& state, FunctionRef<void(const Path& path, const Value& tensor)> f) {
  for (const auto& [key, value] : state) {
    Path path{key};
    visit_tensors(value, path, f);
  }
}

StateDict map_tensors(const StateDict& state, FunctionRef<Value(const Value& tensor)> f) {
  Path path;
  return mapped_entries(state, path, [&](const Path&, const Value& tensor) { return f(tensor); });
}

}  // namespace tessera
