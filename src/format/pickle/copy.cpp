// copy_into: copied nodes are looked up by identity, which keeps sharing and recursion.

#include <unordered_map>
#include <vector>

#include "format/pickle/walk.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/format/pickle_value.h"

namespace tessera::pickle {

namespace {

constexpr std::string_view kCopying = "copy a pickled value";

class Copier {
 public:
  Copier(Tree& destination, const WalkLimits& limits) : to_(destination), limits_(limits), nodes_left_(limits.nodes) {}

  NodeRef copy(NodeRef v, std::size_t depth) {
    if (depth > limits_.depth) {
      fail(ErrorCode::corrupt, "{}: nests deeper than the limit, expected at most {} levels", kCopying, limits_.depth);
    }
    if (nodes_left_-- == 0) {
      fail(ErrorCode::corrupt, "{}: more nodes than the limit, expected at most {}", kCopying, limits_.nodes);
    }
    switch (v.kind()) {
      case Kind::none:
        return NodeRef();
      case Kind::boolean:
        return to_.make_boolean(v.boolean());
      case Kind::integer:
        return to_.make_integer(v.integer());
      default:
        break;
    }
    if (const auto known = copies_.find(v.identity()); known != copies_.end()) return known->second;
    return copy_node(v, depth);
  }

 private:
  NodeRef copy_node(NodeRef v, std::size_t depth) {
    switch (v.kind()) {
      case Kind::big_integer:
        return known(v, to_.make_big_integer(v.big_integer()));
      case Kind::floating:
        return known(v, to_.make_floating(v.floating()));
      case Kind::string:
        return known(v, to_.make_string(v.string()));
      case Kind::bytes:
        return known(v, to_.make_bytes(v.bytes()));
      case Kind::byte_array:
        texts_.charge(as_text(v.bytes()), v.bytes().size(), kCopying);
        return known(v, to_.make_byte_array(v.bytes()));
      case Kind::global: {
        const auto& [module, name] = v.global();
        texts_.charge(v.global(), module.size() + name.size(), kCopying);
        return known(v, to_.make_global(module, name));
      }
      case Kind::list:
      case Kind::set: {
        const NodeRef result = known(v, v.is(Kind::list) ? to_.make_list() : to_.make_set());
        to_.append(result, copy_all(v.items(), depth));
        return result;
      }
      case Kind::dict: {
        const NodeRef result = known(v, to_.make_dict());
        to_.set_items(result, copy_all(v.pairs(), depth));
        return result;
      }
      case Kind::tuple:
        return known(v, to_.make_tuple(copy_all(v.items(), depth)));
      case Kind::frozen_set:
        return known(v, to_.make_frozen_set(copy_all(v.items(), depth)));
      case Kind::persistent_id:
        return known(v, to_.make_persistent_id(copy(v.persistent_id(), depth + 1)));
      case Kind::taken:
        fail(ErrorCode::invalid_argument, "{}: it contains a record that is kept elsewhere, expected none", kCopying);
      default:
        return copy_object(v, depth);
    }
  }

  NodeRef copy_object(NodeRef v, std::size_t depth) {
    const Object& from = v.object();
    const NodeRef callable = copy(from.callable, depth + 1);
    const NodeRef arguments = copy(from.arguments, depth + 1);
    const NodeRef keywords = copy(from.keyword_arguments(), depth + 1);
    // Copying the arguments may have led back here.
    if (const auto known = copies_.find(v.identity()); known != copies_.end()) return known->second;
    const NodeRef result = known(v, to_.make_object(from.made, callable, arguments, keywords));
    to_.append(result, copy_all(from.list_items(), depth));
    to_.set_items(result, copy_all(from.dict_items(), depth));
    const std::size_t states = from.state_count();
    for (std::size_t i = 0; i < states; ++i)
      to_.set_state(result, copy(states == 1 ? from.state : from.state.items()[i], depth + 1));
    for (const NodeRef call : from.setter_calls()) to_.add_setter_call(result, copy(call, depth + 1));
    return result;
  }

  std::vector<NodeRef> copy_all(std::span<const NodeRef> items, std::size_t depth) {
    std::vector<NodeRef> result;
    result.reserve(items.size());
    for (const NodeRef item : items) result.push_back(copy(item, depth + 1));
    return result;
  }

  std::vector<NodeRef> copy_all(std::span<const Pair> pairs, std::size_t depth) {
    std::vector<NodeRef> result;
    result.reserve(2 * pairs.size());
    for (const Pair& pair : pairs) {
      result.push_back(copy(pair.key, depth + 1));
      result.push_back(copy(pair.value, depth + 1));
    }
    return result;
  }

  // The first copy is kept.
  NodeRef known(NodeRef from, NodeRef to) { return copies_.try_emplace(from.identity(), to).first->second; }

  Tree& to_;
  WalkLimits limits_;
  std::uint64_t nodes_left_;
  TextBudget texts_;
  std::unordered_map<std::uint64_t, NodeRef, NumberHash> copies_;
};

}  // namespace

NodeRef copy_into(Tree& destination, NodeRef value, const WalkLimits& limits) {
  return Copier(destination, limits).copy(value, 0);
}

}  // namespace tessera::pickle
