#pragma once
/// \file
/// The inert tree that a pickle becomes. Nothing here is ever called, imported or constructed: a global is two strings,
/// a call is a node that remembers what would have been called with what.
///
/// `NodeRef` is 8 bytes, trivially copyable, and points into the `Tree` that made it (small integers, None and booleans
/// are inside it). A tree's nodes are never freed before the tree. Containers can be shared and, in a hostile pickle,
/// contain themselves: who walks a tree limits depth and the nodes visited (`WalkLimits`). Reading a finished tree is
/// thread-safe.
///
/// A million chunks of a checkpoint are tens of millions of nodes, so a NodeRef is one word: the kind in the highest 8
/// bits, a length in the next 8, an address in the low 48. Text of 1 to 255 bytes needs no node, the length and the
/// address of its bytes are the NodeRef; a tuple of 1 to 255 is the address of its items. With length 0 the address is
/// that of a node that says the length, or 0 for what is empty. An integer of 55 bits is in the word, above a lowest
/// bit of 1.

#include <cassert>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/bytes.h"

namespace tessera::pickle {

enum class Kind : std::uint8_t {
  none,
  boolean,
  integer,
  big_integer,
  floating,
  string,
  bytes,
  byte_array,
  list,
  tuple,
  dict,
  set,
  frozen_set,
  global,
  object,
  persistent_id,
  taken,  ///< stands for a record that the reader of `.metadata` keeps elsewhere; in no tree that it gives away
};

/// Python's name for the kind, for messages: "int", "dict", "global", ...
std::string_view kind_name(Kind kind);

class Nodes;
struct Pair;
struct Object;
struct GlobalName {
  std::string_view module, name;
  bool operator==(const GlobalName&) const = default;
};

class NodeRef {
 public:
  NodeRef() = default;  ///< None
  Kind kind() const { return static_cast<Kind>(bits_ >> 56); }
  bool is(Kind k) const { return kind() == k; }
  bool is_none() const { return is(Kind::none); }
  bool is_string(std::string_view text) const { return is(Kind::string) && string() == text; }
  bool is_global(std::string_view module, std::string_view name) const {
    return is(Kind::global) && global() == GlobalName{module, name};
  }

  // Each of these requires the kind it names.
  bool boolean() const {
    assert(is(Kind::boolean));
    return (bits_ & 1) != 0;
  }
  std::int64_t integer() const;  ///< every int of 64 bits
  ByteView big_integer() const;  ///< two's complement, little-endian, shortest, more than 8 bytes
  double floating() const;
  std::string_view string() const;         ///< UTF-8; lone surrogates as Python's "surrogatepass" has them
  ByteView bytes() const;                  ///< bytes and byte_array
  std::span<const NodeRef> items() const;  ///< list, tuple, set, frozen_set
  std::span<const Pair> pairs() const;     ///< dict, in order of insertion; of equal keys the last counts
  const GlobalName& global() const;
  const Object& object() const;
  NodeRef persistent_id() const;
  std::uint64_t taken() const;  ///< the record's number

  /// The value of the last pair of a dict whose key is the string `key`; nothing if there is none or this is no dict.
  std::optional<NodeRef> find(std::string_view key) const;

  /// Identity: the same node (or the same small value), not equality of contents.
  bool same(NodeRef other) const { return bits_ == other.bits_; }
  /// Stable within a tree; usable as a hash key for identity.
  std::uint64_t identity() const { return bits_; }

 private:
  friend class Nodes;
  explicit NodeRef(std::uint64_t bits) : bits_(bits) {}
  std::size_t short_length() const { return (bits_ >> 48) & 0xff; }
  template <typename T>
  const T* at() const {
    return reinterpret_cast<const T*>(bits_ & 0xffff'ffff'ffff);
  }
  ByteView text() const;
  std::uint64_t bits_ = 0;
};

struct Pair {
  NodeRef key, value;
};

/// What a pickle would have made by a call.
struct Object {
  enum class Made : std::uint8_t { reduce, new_object, new_object_ex, instance, extension };
  struct Extra;

  NodeRef callable;   ///< normally a global; of an extension its code, an int
  NodeRef arguments;  ///< normally a tuple
  NodeRef state;      ///< of BUILD; of several, a tuple of all
  Made made : 8;
  bool has_state : 8;
  std::uint64_t extra_address : 48;  ///< of what few objects have, owned by the tree; 0 for most

  NodeRef keyword_arguments() const;  ///< of new_object_ex, else None
  std::size_t state_count() const;    ///< how many times BUILD was done; above 1, `state` is a tuple of so many
  std::span<const NodeRef> list_items() const;  ///< appended to it (APPEND, APPENDS)
  std::span<const Pair> dict_items() const;     ///< set on it (SETITEM, SETITEMS), for example of an OrderedDict
  bool calls(std::string_view module, std::string_view name) const { return callable.is_global(module, name); }
};
static_assert(sizeof(Object) == 32);

/// Owns the nodes. Move-only.
class Tree {
 public:
  Tree();
  Tree(Tree&&) noexcept;
  Tree& operator=(Tree&&) noexcept;
  ~Tree();

  NodeRef root() const { return root_; }
  void set_root(NodeRef value) { root_ = value; }

  // Building. Text and bytes are copied unless they are said to be borrowed (then they must outlive the tree or be
  // given to `keep`).
  NodeRef make_boolean(bool value);
  NodeRef make_integer(std::int64_t value);
  NodeRef make_big_integer(ByteView two_complement);  ///< any length; becomes an integer where it fits
  NodeRef make_floating(double value);
  NodeRef make_string(std::string_view text);
  NodeRef make_borrowed_string(std::string_view text);
  NodeRef make_bytes(ByteView bytes);
  NodeRef make_borrowed_bytes(ByteView bytes);
  NodeRef make_byte_array(ByteView bytes);
  NodeRef make_tuple(std::span<const NodeRef> items);
  NodeRef make_list(std::span<const NodeRef> items = {});
  NodeRef make_dict();
  NodeRef make_set();
  NodeRef make_frozen_set(std::span<const NodeRef> items);
  NodeRef make_global(std::string_view module, std::string_view name);
  NodeRef make_object(Object::Made made, NodeRef callable, NodeRef arguments, NodeRef keyword_arguments = {});
  NodeRef make_persistent_id(NodeRef id);

  // Changing. `target` is of this tree, of a kind that is named behind, or `Error(invalid_argument)` is thrown.
  void append(NodeRef target, std::span<const NodeRef> items);  ///< list, set or object
  void set_items(NodeRef target,
                 std::span<const NodeRef> keys_and_values);  ///< dict or object; key, value, key, value, ...
  void set_state(NodeRef object, NodeRef state);             ///< object

  /// Makes the tree own a buffer that borrowed text points into.
  void keep(std::shared_ptr<const Bytes> buffer);

  /// Bytes held by nodes (not by kept buffers).
  std::uint64_t memory_bytes() const;

 private:
  friend class Nodes;
  std::unique_ptr<Nodes> nodes_;
  NodeRef root_;
};

/// Limits for those who walk a tree; exceeding one is `Error(corrupt)`.
struct WalkLimits {
  std::size_t depth = 500;
  std::uint64_t nodes = 50'000'000;
};

/// A deep copy of `value` into `destination`, sharing kept.
NodeRef copy_into(Tree& destination, NodeRef value, const WalkLimits& limits = {});

/// Equality of contents as Python would have it for plain values (dict order not compared; 1 != 1.0 != True here, types
/// count; NaN equals NaN of the same bits), and structural for globals and objects.
bool equal(NodeRef a, NodeRef b, const WalkLimits& limits = {});

/// The digits of an int in base 10; of one with more than 4300 digits, which Python refuses to print, in base 16 behind
/// "0x".
std::string integer_to_decimal(NodeRef integer);

namespace detail {
struct TextNode {
  const std::uint8_t* data;
  std::uint64_t size;
};
template <typename T>
struct ArrayNode {
  T* items;
  std::uint32_t count, capacity;
};
struct TupleNode {
  std::uint64_t count;  // the items follow
};
}  // namespace detail

inline std::int64_t NodeRef::integer() const {
  assert(is(Kind::integer));
  if (bits_ & 1) return static_cast<std::int64_t>(bits_ << 8) >> 9;
  return *at<std::int64_t>();
}

inline double NodeRef::floating() const {
  assert(is(Kind::floating));
  return *at<double>();
}

inline ByteView NodeRef::text() const {
  if (short_length() != 0) return {at<std::uint8_t>(), short_length()};
  const auto* node = at<detail::TextNode>();
  return node ? ByteView(node->data, node->size) : ByteView();
}

inline std::string_view NodeRef::string() const {
  assert(is(Kind::string));
  return as_text(text());
}

inline ByteView NodeRef::bytes() const {
  assert(is(Kind::bytes) || is(Kind::byte_array));
  return text();
}

inline ByteView NodeRef::big_integer() const {
  assert(is(Kind::big_integer));
  return text();
}

inline std::span<const NodeRef> NodeRef::items() const {
  if (is(Kind::tuple)) {
    if (short_length() != 0) return {at<NodeRef>(), short_length()};
    const auto* node = at<detail::TupleNode>();
    return node ? std::span(reinterpret_cast<const NodeRef*>(node + 1), node->count) : std::span<const NodeRef>();
  }
  assert(is(Kind::list) || is(Kind::set) || is(Kind::frozen_set));
  const auto* node = at<detail::ArrayNode<NodeRef>>();
  return {node->items, node->count};
}

inline std::span<const Pair> NodeRef::pairs() const {
  assert(is(Kind::dict));
  const auto* node = at<detail::ArrayNode<Pair>>();
  return {node->items, node->count};
}

inline const GlobalName& NodeRef::global() const {
  assert(is(Kind::global));
  return *at<GlobalName>();
}

inline const Object& NodeRef::object() const {
  assert(is(Kind::object));
  return *at<Object>();
}

inline NodeRef NodeRef::persistent_id() const {
  assert(is(Kind::persistent_id));
  return *at<NodeRef>();
}

inline std::uint64_t NodeRef::taken() const {
  assert(is(Kind::taken));
  return bits_ & 0xffff'ffff'ffff;
}

}  // namespace tessera::pickle
