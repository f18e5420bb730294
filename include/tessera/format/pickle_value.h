#pragma once
/// \file
/// The inert tree that a pickle is read into. Nothing is called, imported or constructed: a global is two strings, and
/// a call is a node with the callable and its arguments.
///
/// A `NodeRef` refers to one value of a tree. It is 8 bytes, trivially copyable, and points into the `Tree` that made
/// it (small integers, None and booleans are stored in the NodeRef itself). A tree frees its nodes only when it is
/// destroyed. Containers can be shared and, in a hostile pickle, contain themselves, so code that walks a tree must
/// limit the depth and the number of nodes visited (`WalkLimits`). Reading a finished tree is thread-safe.
///
/// A checkpoint of a million chunks has tens of millions of nodes, so a NodeRef is one word: the kind in the highest 8
/// bits, a length in the next 8, an address in the low 48. Text of 1 to 255 bytes has no node: the NodeRef has its
/// length and the address of its bytes. For a tuple of 1 to 255 items, the address is that of the items. With length 0,
/// the address is that of a node that has the length, or 0 for empty values. An integer of up to 55 bits is in the
/// word, above a lowest bit of 1.

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
  taken,  ///< a record that the reader of `.metadata` keeps elsewhere; never in a tree that is given to callers
};

/// Returns Python's name for the kind, for messages: "int", "dict", "global", ...
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

  // Each of these requires the kind in its name.
  bool boolean() const {
    assert(is(Kind::boolean));
    return (bits_ & 1) != 0;
  }
  std::int64_t integer() const;  ///< any int of up to 64 bits
  ByteView big_integer() const;  ///< two's complement, little-endian, shortest form, more than 8 bytes
  double floating() const;
  std::string_view string() const;         ///< UTF-8; lone surrogates as with Python's "surrogatepass"
  ByteView bytes() const;                  ///< of bytes and byte_array
  std::span<const NodeRef> items() const;  ///< of list, tuple, set and frozen_set
  std::span<const Pair> pairs() const;     ///< of dict, in order of insertion; among equal keys, the last one counts
  const GlobalName& global() const;
  const Object& object() const;
  NodeRef persistent_id() const;
  std::uint64_t taken() const;  ///< the record's number

  /// Returns the value of the last pair whose key is the string `key`. Returns nothing if there is none or if this is
  /// not a dict.
  std::optional<NodeRef> find(std::string_view key) const;

  /// Returns whether both refer to the same node (or the same small value). Does not compare contents.
  bool same(NodeRef other) const { return bits_ == other.bits_; }
  /// Returns a key for identity, stable within a tree and usable as a hash key.
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

/// A call recorded in a pickle: the object that Python would have made by it.
struct Object {
  enum class Made : std::uint8_t { reduce, new_object, new_object_ex, instance, extension };
  struct Extra;

  NodeRef callable;   ///< normally a global; for an extension its code, an int
  NodeRef arguments;  ///< normally a tuple
  NodeRef state;      ///< set by BUILD; if there were several, a tuple of all states
  Made made : 8;
  bool has_state : 8;
  std::uint64_t extra_address : 48;  ///< rare fields, owned by the tree; 0 for most objects

  NodeRef keyword_arguments() const;            ///< of new_object_ex, otherwise None
  std::size_t state_count() const;              ///< number of BUILDs; above 1, `state` is a tuple of that length
  std::span<const NodeRef> list_items() const;  ///< items appended to the object (APPEND, APPENDS)
  std::span<const Pair> dict_items() const;     ///< items set on the object (SETITEM, SETITEMS), as for OrderedDict
  /// Calls with the object and a state as arguments, whose results are dropped (REDUCE, POP): Python's state setters.
  std::span<const NodeRef> setter_calls() const;
  bool calls(std::string_view module, std::string_view name) const { return callable.is_global(module, name); }
};
static_assert(sizeof(Object) == 32);

/// A tree, which owns its nodes. Move-only.
class Tree {
 public:
  Tree();
  Tree(Tree&&) noexcept;
  Tree& operator=(Tree&&) noexcept;
  ~Tree();

  NodeRef root() const { return root_; }
  void set_root(NodeRef value) { root_ = value; }

  // Creating values. Text and bytes are copied, except by the `borrowed` functions: that memory must outlive the tree
  // or be passed to `keep`.
  NodeRef make_boolean(bool value);
  NodeRef make_integer(std::int64_t value);
  NodeRef make_big_integer(ByteView two_complement);  ///< any length; becomes an integer if it fits
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

  // Modifying values. `target` must belong to this tree. Throws `Error(invalid_argument)` if it is of another kind than
  // the comment lists.
  void append(NodeRef target, std::span<const NodeRef> items);  ///< list, set or object
  void set_items(NodeRef target,
                 std::span<const NodeRef> keys_and_values);  ///< dict or object; key, value, key, value, ...
  void set_state(NodeRef object, NodeRef state);             ///< object
  void add_setter_call(NodeRef object, NodeRef call);        ///< object

  /// Makes the tree share ownership of a buffer that borrowed text points into.
  void keep(std::shared_ptr<const Bytes> buffer);

  /// Returns the number of bytes held by nodes, without kept buffers.
  std::uint64_t memory_bytes() const;

 private:
  friend class Nodes;
  std::unique_ptr<Nodes> nodes_;
  NodeRef root_;
};

/// Limits for walking a tree. Exceeding one throws `Error(corrupt)`.
struct WalkLimits {
  std::size_t depth = 500;
  std::uint64_t nodes = 50'000'000;
};

/// Copies `value` deeply into `destination`. Shared nodes stay shared.
NodeRef copy_into(Tree& destination, NodeRef value, const WalkLimits& limits = {});

/// Returns whether two values are equal. Plain values compare by content as in Python: the order of a dict is ignored,
/// but types count (1, 1.0 and True differ), and a NaN equals a NaN of the same bits. Globals and objects compare by
/// structure.
bool equal(NodeRef a, NodeRef b, const WalkLimits& limits = {});

/// Returns the digits of an int in base 10. An int of more than 4300 digits, which Python refuses to print, is returned
/// in base 16 with the prefix "0x"; of such an int, returns about the first `limit` digits, in a time that depends on
/// `limit` alone.
std::string integer_to_decimal(NodeRef integer, std::size_t limit = SIZE_MAX);

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
