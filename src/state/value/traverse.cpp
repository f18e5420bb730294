#include "tessera/state/traverse.h"

#include "tessera/base/error.h"

namespace tessera {

namespace {

constexpr std::int64_t kMaxListLength = 10'000'000;
constexpr std::size_t kMaxDepth = 1000;

std::string part_text(const Key& part) {
  const auto* index = std::get_if<std::int64_t>(&part);
  return index ? std::to_string(*index) : std::get<std::string>(part);
}

class Traversal {
 public:
  Traversal(Visitor visit, TraversalRules rules, KeepTraversing keep_traversing)
      : visit_(visit), rules_(rules), keep_traversing_(keep_traversing) {}

  void walk(const Value& value) {
    if (path_.size() > kMaxDepth) {
      fail(ErrorCode::invalid_argument, "traverse state dict: '{}' nests deeper than {}, expected at most that",
           printable(flat_name(path_)), kMaxDepth);
    }
    const Dict* dict = value.get_if<Dict>();
    if (dict && (rules_ == TraversalRules::since_2_4 || !is_terminal(value, 0))) return walk_dict(*dict);
    if (dict || is_terminal(value, 0)) return visit_(path_, value);
    const List& list = value.get<List>();
    for (std::size_t i = 0; i < list.size(); ++i) {
      path_.emplace_back(static_cast<std::int64_t>(i));
      walk(list[i]);
      path_.pop_back();
    }
  }

  void walk_dict(const Dict& dict) {
    for (const auto& [key, value] : dict) {
      path_.emplace_back(part_text(key));
      walk(value);
      path_.pop_back();
    }
  }

 private:
  bool is_terminal(const Value& value, std::size_t depth) const {
    if (depth > kMaxDepth) {
      fail(ErrorCode::invalid_argument, "traverse state dict: '{}' nests deeper than {}, expected at most that",
           printable(flat_name(path_)), kMaxDepth);
    }
    if (const Dict* dict = value.get_if<Dict>()) {
      if (rules_ == TraversalRules::since_2_4) return false;
      for (const auto& [key, item] : *dict) {
        if (leads_on(item, depth)) return false;
      }
    } else if (const List* list = value.get_if<List>()) {
      for (const Value& item : *list) {
        if (leads_on(item, depth)) return false;
      }
    }
    return true;
  }

  bool leads_on(const Value& item, std::size_t depth) const {
    if ((item.is<Dict>() || item.is<List>()) && !is_terminal(item, depth + 1)) return true;
    return keep_traversing_ && keep_traversing_(item);
  }

  Visitor visit_;
  TraversalRules rules_;
  KeepTraversing keep_traversing_;
  Path path_;
};

// Throws naming the part of `path` that does not fit the container at that position.
[[noreturn]] void refuse_part(const Path& path, std::size_t i, const Value& container) {
  fail(ErrorCode::invalid_argument, "set element '{}': part {} ({}) leads into {} ({}), expected a matching container",
       printable(flat_name(path)), i, printable(to_string(path[i])), kind_name(container.kind()),
       to_string(container, 60));
}

// Returns the item `path[i]` of a list, after extending the list if needed.
Value& list_item(List& list, const Path& path, std::size_t i) {
  const std::int64_t index = std::get<std::int64_t>(path[i]);
  if (index < 0 || index >= kMaxListLength) {
    fail(ErrorCode::invalid_argument, "set element '{}': the list index is {}, expected 0 to {}",
         printable(flat_name(path)), index, kMaxListLength - 1);
  }
  const auto at = static_cast<std::size_t>(index);
  if (at >= list.size()) list.resize(at + 1);
  return list[at];
}

}  // namespace

std::string flat_name(const Path& path) {
  std::string name;
  for (std::size_t i = 0; i < path.size(); ++i) {
    if (i != 0) name += '.';
    if (const auto* key = std::get_if<std::string>(&path[i])) {
      name += *key;
    } else {
      name += std::to_string(std::get<std::int64_t>(path[i]));
    }
  }
  return name;
}

bool keep_visiting_tensors(const Value& item) { return item.is_any_tensor(); }

void traverse_state_dict(const StateDict& state_dict, Visitor visit, TraversalRules rules,
                         KeepTraversing keep_traversing) {
  Traversal(visit, rules, keep_traversing).walk_dict(state_dict);
}

void set_element(StateDict& root, const Path& path, Value value) {
  if (path.empty()) fail(ErrorCode::invalid_argument, "set element: the path is empty, expected at least one part");
  bool is_missing = !root.contains(path[0]);
  Value* at = &root[path[0]];
  for (std::size_t i = 1; i < path.size(); ++i) {
    const bool by_name = std::holds_alternative<std::string>(path[i]);
    if (is_missing) *at = by_name ? Value(Dict()) : Value(List());
    if (Dict* dict = at->get_if<Dict>()) {
      is_missing = !dict->contains(path[i]);
      at = &(*dict)[path[i]];
    } else if (List* list = at->get_if<List>(); list && !by_name) {
      at = &list_item(*list, path, i);
      is_missing = at->is_none();
    } else {
      refuse_part(path, i, *at);
    }
  }
  *at = std::move(value);
}

const Value* get_element(const StateDict& root, const Path& path) {
  const Value* at = nullptr;
  for (const Key& part : path) {
    if (const auto* index = std::get_if<std::int64_t>(&part)) {
      const List* list = at ? at->get_if<List>() : nullptr;
      if (!list || *index < 0 || static_cast<std::uint64_t>(*index) >= list->size()) return nullptr;
      at = &(*list)[static_cast<std::size_t>(*index)];
    } else {
      const Dict* dict = at ? at->get_if<Dict>() : &root;
      at = dict ? dict->find(part) : nullptr;
      if (!at) return nullptr;
    }
  }
  return at;
}

Value* get_element(StateDict& root, const Path& path) {
  return const_cast<Value*>(get_element(std::as_const(root), path));
}

const Value& detail::require_element(const StateDict& root, const Path& path, ValueKind expected) {
  const Value* found = get_element(root, path);
  if (!found) fail(ErrorCode::not_found, "state dict: nothing at '{}', expected a value", printable(flat_name(path)));
  if (found->kind() != expected) {
    fail(ErrorCode::invalid_argument, "state dict: '{}' is {} ({}), expected {}", printable(flat_name(path)),
         kind_name(found->kind()), to_string(*found, 60), kind_name(expected));
  }
  return *found;
}

}  // namespace tessera
