#pragma once
// The memory of a tree. Nodes are bump-allocated in blocks that are freed together. Arrays of lists and dicts are sized
// exactly at the first batch and double afterwards. Large arrays are outside of the blocks, so growing them wastes
// none.

#include <cstdint>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/format/pickle_value.h"

namespace tessera::pickle {

struct Object::Extra {
  NodeRef keyword_arguments;
  detail::ArrayNode<NodeRef> list_items{};
  detail::ArrayNode<Pair> dict_items{};
  detail::ArrayNode<NodeRef> setter_calls{};
  std::size_t state_count = 0;  // 0: has_state decides
};

// Calls whose result is plain data with a known value; see read/fold.h.
enum class Fold : std::uint8_t { none, encode, bytes, byte_array, set, frozen_set, new_object, new_object_ex };

struct GlobalNode {
  GlobalName name;
  Fold fold;
};

class Nodes {
 public:
  // Thrown if nodes would exceed the memory limit.
  struct Full {};

  Nodes() = default;
  Nodes(const Nodes&) = delete;
  Nodes& operator=(const Nodes&) = delete;
  ~Nodes();

  static Nodes& of(Tree& tree) { return *tree.nodes_; }

  void set_limit(std::uint64_t bytes) { limit_bytes_ = bytes; }
  std::uint64_t limit_bytes() const { return limit_bytes_; }
  std::uint64_t memory_bytes() const { return reserved_bytes_ - static_cast<std::uint64_t>(end_ - next_); }
  void keep(std::shared_ptr<const Bytes> buffer) { kept_.push_back(std::move(buffer)); }

  // From now on, copies text that would have been borrowed.
  void copy_texts() { copies_texts_ = true; }

  // A word that is no kind of value.
  static NodeRef invalid() { return NodeRef(~std::uint64_t{0}); }
  static NodeRef boolean(bool value) { return pack(Kind::boolean, value ? 1 : 0); }
  NodeRef integer(std::int64_t value) {
    const auto bits = static_cast<std::uint64_t>(value);
    if (value >= -kSmallIntegerEnd && value < kSmallIntegerEnd)
      return pack(Kind::integer, ((bits << 1) | 1) & 0xff'ffff'ffff'ffff);
    return pack(Kind::integer, address(create<std::int64_t>(value)));
  }
  NodeRef floating(double value) { return pack(Kind::floating, address(create<double>(value))); }
  // `bytes` must live as long as the tree, unless texts are copied.
  NodeRef text(Kind kind, ByteView bytes) {
    if (bytes.size() > 255) return text_node(kind, bytes);
    if (bytes.empty()) return pack(kind, 0);
    return pack(kind, address(kept(bytes).data()) | (std::uint64_t{bytes.size()} << 48));
  }
  // A bytearray is mutable, so each is a node of its own.
  NodeRef text_node(Kind kind, ByteView bytes) {
    bytes = kept(bytes);
    return pack(kind, address(create<detail::TextNode>({bytes.data(), bytes.size()})));
  }
  std::uint8_t* make_room(std::size_t bytes) { return static_cast<std::uint8_t*>(allocate(bytes)); }
  ByteView copy(ByteView bytes) {
    if (bytes.empty()) return {};
    std::uint8_t* data = make_room(bytes.size());
    std::memcpy(data, bytes.data(), bytes.size());
    return {data, bytes.size()};
  }
  NodeRef tuple(const NodeRef* items, std::size_t count) {
    if (count == 0) return pack(Kind::tuple, 0);
    if (count > 255) return long_tuple(items, count);
    auto* data = static_cast<NodeRef*>(allocate(count * sizeof(NodeRef)));
    std::memcpy(static_cast<void*>(data), items, count * sizeof(NodeRef));
    return pack(Kind::tuple, address(data) | (std::uint64_t{count} << 48));
  }
  NodeRef list(Kind kind) { return pack(kind, address(create<detail::ArrayNode<NodeRef>>({nullptr, 0, 0}))); }
  NodeRef dict() { return pack(Kind::dict, address(create<detail::ArrayNode<Pair>>({nullptr, 0, 0}))); }
  NodeRef global(std::string_view module, std::string_view name);  // both are texts
  NodeRef object(Object::Made made, NodeRef callable, NodeRef arguments) {
    return pack(Kind::object, address(create<Object>({callable, arguments, NodeRef(), made, false, 0})));
  }
  NodeRef object_with_keywords(NodeRef callable, NodeRef arguments, NodeRef keyword_arguments);
  static NodeRef taken(std::uint64_t number) { return pack(Kind::taken, number & 0xffff'ffff'ffff); }
  NodeRef persistent_id(NodeRef id) { return pack(Kind::persistent_id, address(create<NodeRef>(id))); }

  void append(NodeRef list, const NodeRef* items, std::size_t count) {
    append_array(change<detail::ArrayNode<NodeRef>>(list), items, count);
  }
  // `pairs` is key, value, key, value, ...
  void set_items(NodeRef dict, const NodeRef* pairs, std::size_t count) {
    append_array(change<detail::ArrayNode<Pair>>(dict), reinterpret_cast<const Pair*>(pairs), count);
  }
  void append_to_object(NodeRef object, const NodeRef* items, std::size_t count) {
    append_array(extra(object).list_items, items, count);
  }
  void set_items_of_object(NodeRef object, const NodeRef* pairs, std::size_t count) {
    append_array(extra(object).dict_items, reinterpret_cast<const Pair*>(pairs), count);
  }
  void add_setter_call(NodeRef object, NodeRef call) { append_array(extra(object).setter_calls, &call, 1); }
  void set_state(NodeRef object, NodeRef state) {
    auto& node = change<Object>(object);
    if (node.has_state) return add_state(object, state);
    node.state = state;
    node.has_state = true;
  }
  static Fold fold_of(NodeRef global) { return global.at<GlobalNode>()->fold; }

 private:
  static constexpr std::int64_t kSmallIntegerEnd = std::int64_t{1} << 54;
  static NodeRef pack(Kind kind, std::uint64_t payload) {
    return NodeRef((static_cast<std::uint64_t>(kind) << 56) | payload);
  }
  static std::uint64_t address(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }
  template <typename T>
  T& change(NodeRef value) {
    return *const_cast<T*>(value.at<T>());
  }
  template <typename T>
  T* create(const T& value) {
    return new (allocate(sizeof(T))) T(value);
  }
  void* allocate(std::size_t bytes) {
    bytes = (bytes + 7) & ~std::size_t{7};
    if (bytes > static_cast<std::size_t>(end_ - next_)) return allocate_in_new_block(bytes);
    void* result = next_;
    next_ += bytes;
    return result;
  }
  template <typename T>
  void append_array(detail::ArrayNode<T>& node, const T* items, std::size_t count) {
    if (count == 0) return;
    if (count > node.capacity - node.count)
      node.items = static_cast<T*>(grow(node.items, node.count, node.capacity, count, sizeof(T)));
    std::memcpy(static_cast<void*>(node.items + node.count), items, count * sizeof(T));
    node.count += static_cast<std::uint32_t>(count);
  }
  ByteView kept(ByteView bytes) { return copies_texts_ ? copy(bytes) : bytes; }
  void* allocate_in_new_block(std::size_t bytes);
  void* malloc_block(std::size_t bytes);
  void* grow(void* items, std::uint32_t count, std::uint32_t& capacity, std::size_t more, std::size_t item_bytes);
  void reserve_bytes(std::uint64_t bytes);
  NodeRef long_tuple(const NodeRef* items, std::size_t count);
  Object::Extra& extra(NodeRef object);
  void add_state(NodeRef object, NodeRef state);

  std::uint8_t* next_ = nullptr;
  std::uint8_t* end_ = nullptr;
  std::size_t next_block_bytes_ = 2048;
  std::uint64_t reserved_bytes_ = 0;
  std::uint64_t limit_bytes_ = UINT64_MAX;
  bool copies_texts_ = false;
  std::vector<void*> blocks_, mapped_blocks_;
  std::unordered_map<void*, std::uint64_t> large_arrays_;  // array -> its bytes
  std::vector<std::shared_ptr<const Bytes>> kept_;
};

}  // namespace tessera::pickle
