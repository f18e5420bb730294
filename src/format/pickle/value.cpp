#include "tessera/format/pickle_value.h"

#include <algorithm>

#include "format/pickle/integer.h"
#include "format/pickle/nodes.h"

namespace tessera::pickle {

namespace {

const Object::Extra* extra_of(const Object& object) {
  return reinterpret_cast<const Object::Extra*>(static_cast<std::uint64_t>(object.extra_address));
}

[[noreturn]] void wrong_target(std::string_view operation, NodeRef target, std::string_view expected) {
  fail(ErrorCode::invalid_argument, "pickle tree: {} a {}, expected {}", operation, kind_name(target.kind()), expected);
}

}  // namespace

std::string_view kind_name(Kind kind) {
  switch (kind) {
    case Kind::none:
      return "None";
    case Kind::boolean:
      return "bool";
    case Kind::integer:
    case Kind::big_integer:
      return "int";
    case Kind::floating:
      return "float";
    case Kind::string:
      return "str";
    case Kind::bytes:
      return "bytes";
    case Kind::byte_array:
      return "bytearray";
    case Kind::list:
      return "list";
    case Kind::tuple:
      return "tuple";
    case Kind::dict:
      return "dict";
    case Kind::set:
      return "set";
    case Kind::frozen_set:
      return "frozenset";
    case Kind::global:
      return "global";
    case Kind::object:
      return "object";
    case Kind::persistent_id:
      return "persistent id";
    case Kind::taken:
      return "taken record";
  }
  return "unknown";
}

std::optional<NodeRef> NodeRef::find(std::string_view key) const {
  if (!is(Kind::dict)) return std::nullopt;
  const auto all = pairs();
  const auto found = std::find_if(all.rbegin(), all.rend(), [&](const Pair& pair) { return pair.key.is_string(key); });
  if (found == all.rend()) return std::nullopt;
  return found->value;
}

NodeRef Object::keyword_arguments() const {
  const Extra* more = extra_of(*this);
  return more ? more->keyword_arguments : NodeRef();
}

std::size_t Object::state_count() const {
  const Extra* more = extra_of(*this);
  return more && more->state_count != 0 ? more->state_count : (has_state ? 1 : 0);
}

std::span<const NodeRef> Object::list_items() const {
  const Extra* more = extra_of(*this);
  if (more == nullptr) return {};
  return {more->list_items.items, more->list_items.count};
}

std::span<const Pair> Object::dict_items() const {
  const Extra* more = extra_of(*this);
  if (more == nullptr) return {};
  return {more->dict_items.items, more->dict_items.count};
}

std::span<const NodeRef> Object::setter_calls() const {
  const Extra* more = extra_of(*this);
  if (more == nullptr) return {};
  return {more->setter_calls.items, more->setter_calls.count};
}

Tree::Tree() : nodes_(std::make_unique<Nodes>()) {}
Tree::Tree(Tree&&) noexcept = default;
Tree& Tree::operator=(Tree&&) noexcept = default;
Tree::~Tree() = default;

NodeRef Tree::make_boolean(bool value) { return Nodes::boolean(value); }
NodeRef Tree::make_integer(std::int64_t value) { return nodes_->integer(value); }

NodeRef Tree::make_big_integer(ByteView two_complement) {
  const ByteView shortest = shortest_integer(two_complement);
  if (shortest.size() <= 8) return nodes_->integer(integer_from_bytes(shortest));
  return nodes_->text(Kind::big_integer, nodes_->copy(shortest));
}

NodeRef Tree::make_floating(double value) { return nodes_->floating(value); }
NodeRef Tree::make_string(std::string_view text) { return nodes_->text(Kind::string, nodes_->copy(as_bytes(text))); }
NodeRef Tree::make_borrowed_string(std::string_view text) { return nodes_->text(Kind::string, as_bytes(text)); }
NodeRef Tree::make_bytes(ByteView bytes) { return nodes_->text(Kind::bytes, nodes_->copy(bytes)); }
NodeRef Tree::make_borrowed_bytes(ByteView bytes) { return nodes_->text(Kind::bytes, bytes); }
NodeRef Tree::make_byte_array(ByteView bytes) { return nodes_->text_node(Kind::byte_array, nodes_->copy(bytes)); }
NodeRef Tree::make_tuple(std::span<const NodeRef> items) { return nodes_->tuple(items.data(), items.size()); }

NodeRef Tree::make_list(std::span<const NodeRef> items) {
  const NodeRef result = nodes_->list(Kind::list);
  nodes_->append(result, items.data(), items.size());
  return result;
}

NodeRef Tree::make_dict() { return nodes_->dict(); }
NodeRef Tree::make_set() { return nodes_->list(Kind::set); }

NodeRef Tree::make_frozen_set(std::span<const NodeRef> items) {
  const NodeRef result = nodes_->list(Kind::frozen_set);
  nodes_->append(result, items.data(), items.size());
  return result;
}

NodeRef Tree::make_global(std::string_view module, std::string_view name) {
  return nodes_->global(as_text(nodes_->copy(as_bytes(module))), as_text(nodes_->copy(as_bytes(name))));
}

NodeRef Tree::make_object(Object::Made made, NodeRef callable, NodeRef arguments, NodeRef keyword_arguments) {
  if (made == Object::Made::new_object_ex) return nodes_->object_with_keywords(callable, arguments, keyword_arguments);
  return nodes_->object(made, callable, arguments);
}

NodeRef Tree::make_persistent_id(NodeRef id) { return nodes_->persistent_id(id); }

void Tree::append(NodeRef target, std::span<const NodeRef> items) {
  if (target.is(Kind::list) || target.is(Kind::set)) {
    nodes_->append(target, items.data(), items.size());
  } else if (target.is(Kind::object)) {
    nodes_->append_to_object(target, items.data(), items.size());
  } else {
    wrong_target("append to", target, "a list, a set or an object");
  }
}

void Tree::set_items(NodeRef target, std::span<const NodeRef> keys_and_values) {
  if (keys_and_values.size() % 2 != 0)
    fail(ErrorCode::invalid_argument, "pickle tree: a key without a value among {} keys and values, expected pairs",
         keys_and_values.size());
  if (target.is(Kind::dict)) {
    nodes_->set_items(target, keys_and_values.data(), keys_and_values.size() / 2);
  } else if (target.is(Kind::object)) {
    nodes_->set_items_of_object(target, keys_and_values.data(), keys_and_values.size() / 2);
  } else {
    wrong_target("set items of", target, "a dict or an object");
  }
}

void Tree::set_state(NodeRef object, NodeRef state) {
  if (!object.is(Kind::object)) wrong_target("set the state of", object, "an object");
  nodes_->set_state(object, state);
}

void Tree::add_setter_call(NodeRef object, NodeRef call) {
  if (!object.is(Kind::object)) wrong_target("add a call of a setter to", object, "an object");
  nodes_->add_setter_call(object, call);
}

void Tree::keep(std::shared_ptr<const Bytes> buffer) { nodes_->keep(std::move(buffer)); }
std::uint64_t Tree::memory_bytes() const { return nodes_->memory_bytes(); }

}  // namespace tessera::pickle
