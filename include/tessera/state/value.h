#pragma once
/// \file
/// The values of a state dict: nested Python-like values, and tensors.
///
///     StateDict state{{"model", Dict{{"weight", weight}, {"bias", bias}}}, {"betas", Tuple{0.9, 0.999}}, {"step", 3}};
///     std::int64_t step = state.at("step").get<std::int64_t>();
///
/// Copies: numbers, text, bytes, lists, tuples and dicts are copied by value. Tensors of every kind are references, as
/// in LibTorch: a copy shares the elements. Opaque objects are immutable and shared. Statefuls are shared. Copying a
/// state dict therefore costs its names and numbers, never an element.
///
/// Laws: values of different kinds are unequal (Value(1), Value(1.0) and Value(true) all differ). Floats are compared
/// by bits (a NaN equals itself, 0.0 does not equal -0.0). Dicts are compared regardless of order. A dict keeps the
/// order of insertion; assigning to an existing key does not change the order. Keys are strings or ints, and "1" is
/// not 1.
///
/// Any number of threads may read a value; changing it requires exclusive access. PyTorch: `STATE_DICT_TYPE`.

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/state_path.h"
#include "tessera/format/pickle_value.h"
#include "tessera/state/nested_sharded_tensor.h"
#include "tessera/tensor/checkpointable.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera {

class DTensor;
class Stateful;
class Value;
class List;
class Tuple;
class Dict;

enum class ValueKind : std::uint8_t {
  none,
  boolean,
  integer,
  floating,
  string,
  bytes,
  list,
  tuple,
  dict,
  tensor,
  sharded_tensor,
  nested_sharded_tensor,
  checkpointable,
  opaque,
  stateful,
};

/// Returns the name of a kind for messages: "None", "bool", "int", "float", "str", "bytes", "list", "tuple", "dict",
/// "tensor", "sharded tensor", "nested sharded tensor", "checkpointable", "opaque object" or "stateful".
std::string_view kind_name(ValueKind kind);

/// A pickled object of an unknown type, kept unexecuted and complete so that it can be written again. `tree` owns
/// `value`; `storages` holds the bytes of the storages that the object refers to, by key. Immutable.
struct OpaqueObject {
  std::shared_ptr<const pickle::Tree> tree;
  pickle::NodeRef value;
  std::map<std::string, std::shared_ptr<const Bytes>> storages;
};

namespace detail {

template <typename T, typename... Others>
concept OneOf = (std::same_as<T, Others> || ...);
template <typename T>
concept Character = OneOf<T, char, wchar_t, char8_t, char16_t, char32_t>;

// Throws Error(invalid_argument) if the value exceeds int64.
std::int64_t to_int64(std::uint64_t value);

}  // namespace detail

/// One value: None, a number, text, bytes, a container or a tensor.
class Value {
 public:
  // NOLINTBEGIN(google-explicit-constructor): state dicts are written as in Python
  Value();  ///< None
  Value(std::nullptr_t) : Value() {}
  template <std::same_as<bool> T>
  Value(T value) : data_(std::in_place_type<bool>, value) {}
  /// Throws `Error(invalid_argument)` if the value exceeds int64.
  template <std::integral T>
  requires(!std::same_as<T, bool> && !detail::Character<T>) Value(T value)
      : data_(std::in_place_type<std::int64_t>, to_integer(value)) {}
  template <std::floating_point T>
  Value(T value) : data_(std::in_place_type<double>, static_cast<double>(value)) {}
  Value(const char* text);
  Value(std::string_view text);
  Value(std::string text);  ///< must be UTF-8 to be saved; lone surrogates are allowed
  Value(Bytes bytes);
  Value(List list);
  Value(Tuple tuple);
  Value(Dict dict);
  /// Throws `Error(invalid_argument)` for an undefined tensor, which Python does not have.
  Value(at::Tensor tensor);
  Value(ShardedTensor tensor);
  Value(NestedShardedTensor tensor);
  /// Throws `Error(invalid_argument)` if the pointer is null, as does the one for OpaqueObject.
  template <std::derived_from<Checkpointable> T>
  Value(std::shared_ptr<T> tensor) : Value(Reference{std::move(tensor)}) {}
  /// Holds `tensor.checkpointable()`; throws as that.
  Value(const DTensor& tensor);
  Value(std::shared_ptr<const OpaqueObject> object);
  /// An object whose state is saved and loaded; see stateful.h.
  template <std::derived_from<Stateful> T>
  Value(std::shared_ptr<T> object) : Value(StatefulReference{std::move(object)}) {}
  // NOLINTEND(google-explicit-constructor)

  Value(const Value& other);
  Value(Value&& other) noexcept;  ///< leaves None
  Value& operator=(const Value& other);
  Value& operator=(Value&& other) noexcept;
  ~Value();

  ValueKind kind() const { return static_cast<ValueKind>(data_.index()); }
  bool is_none() const { return kind() == ValueKind::none; }
  /// Returns whether it is a tensor of any kind, including sharded tensors and Checkpointables, which are all
  /// torch.Tensor in PyTorch.
  bool is_any_tensor() const { return kind() >= ValueKind::tensor && kind() <= ValueKind::checkpointable; }

  /// Returns the value as a T, or null if it is of another kind. T is bool, std::int64_t, double, std::string, Bytes,
  /// List, Tuple, Dict, at::Tensor, ShardedTensor, NestedShardedTensor (const), std::shared_ptr<Checkpointable>,
  /// std::shared_ptr<const OpaqueObject> or std::shared_ptr<Stateful>. Ints and floats are not converted; see `number`.
  template <typename T>
  const T* get_if() const;
  template <typename T>
  T* get_if();
  template <typename T>
  bool is() const {
    return get_if<T>() != nullptr;
  }
  /// As `get_if`, but throws `Error(invalid_argument)` naming both kinds if the value is of another kind.
  template <typename T>
  const T& get() const;
  template <typename T>
  T& get();
  /// Returns an int or a float as a double. Throws `Error(invalid_argument)` for other kinds.
  double number() const;

  bool operator==(const Value& other) const;
  /// Prints `to_string(value)`.
  friend std::ostream& operator<<(std::ostream& out, const Value& value);

 private:
  struct Reference {
    std::shared_ptr<Checkpointable> tensor;
  };
  explicit Value(Reference reference);
  struct StatefulReference {
    std::shared_ptr<Stateful> object;
  };
  explicit Value(StatefulReference reference);
  using Data =
      std::variant<std::monostate, bool, std::int64_t, double, std::string, Bytes, std::unique_ptr<List>,
                   std::unique_ptr<Tuple>, std::unique_ptr<Dict>, at::Tensor, ShardedTensor,
                   std::shared_ptr<const NestedShardedTensor>, std::shared_ptr<Checkpointable>,
                   std::shared_ptr<const OpaqueObject>, std::shared_ptr<Stateful>>;  // in the order of ValueKind
  static Data copy_of(const Data& data);
  template <std::integral T>
  static std::int64_t to_integer(T value) {
    if constexpr (std::is_unsigned_v<T> && sizeof(T) == sizeof(std::uint64_t)) return detail::to_int64(value);
    return static_cast<std::int64_t>(value);
  }
  [[noreturn]] void refuse(ValueKind expected) const;

  Data data_;
};

/// A sequence of values; the common base of List and Tuple.
class ValueSequence {
 public:
  std::size_t size() const { return items_.size(); }
  bool empty() const { return items_.empty(); }
  const Value& operator[](std::size_t i) const { return items_[i]; }
  Value& operator[](std::size_t i) { return items_[i]; }
  /// Throws `Error(not_found)` if `i >= size()`.
  const Value& at(std::size_t i) const;
  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }
  auto begin() { return items_.begin(); }
  auto end() { return items_.end(); }
  void push_back(Value value) { items_.push_back(std::move(value)); }
  void reserve(std::size_t count) { items_.reserve(count); }
  /// New items are None.
  void resize(std::size_t count) { items_.resize(count); }
  bool operator==(const ValueSequence& other) const = default;

 protected:
  ValueSequence() = default;
  explicit ValueSequence(std::vector<Value> items) : items_(std::move(items)) {}

 private:
  std::vector<Value> items_;
};

/// A list. To make one whose only item is a list, write `List{Value(inner)}`: for `List{inner}`, some compilers make a
/// copy and others a list of a list. The same holds for tuples.
class List : public ValueSequence {
 public:
  List() = default;
  List(std::initializer_list<Value> items) : ValueSequence(std::vector<Value>(items)) {}
  explicit List(std::vector<Value> items) : ValueSequence(std::move(items)) {}
};

class Tuple : public ValueSequence {
 public:
  Tuple() = default;
  Tuple(std::initializer_list<Value> items) : ValueSequence(std::vector<Value>(items)) {}
  explicit Tuple(std::vector<Value> items) : ValueSequence(std::move(items)) {}
};

/// Returns the key as Python prints it: `'weight'` or `3`.
std::string to_string(const Key& key);

/// A dict in order of insertion.
class Dict {
 public:
  struct Entry {
    Key key;
    Value value;
    bool operator==(const Entry&) const = default;
  };

  Dict() = default;
  /// For equal keys, the first one determines the position and the last one the value, as in Python.
  Dict(std::initializer_list<Entry> entries);

  std::size_t size() const { return entries_.size(); }
  bool empty() const { return entries_.empty(); }
  /// In order of insertion.
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }
  bool contains(const Key& key) const { return find(key) != nullptr; }
  /// Returns the value of `key`, or null if there is none. The pointer is valid until the dict is changed.
  const Value* find(const Key& key) const;
  Value* find(const Key& key);
  /// Returns the value of `key`. Throws `Error(not_found)` naming the key if there is none.
  const Value& at(const Key& key) const;
  Value& at(const Key& key);
  /// Returns the value of `key`; inserts None if there is none.
  Value& operator[](const Key& key);
  void insert_or_assign(const Key& key, Value value);
  /// Removes the entry of `key`; returns whether there was one. O(size).
  bool erase(const Key& key);
  void reserve(std::size_t count) { entries_.reserve(count); }

  bool operator==(const Dict& other) const;
  friend std::ostream& operator<<(std::ostream& out, const Dict& dict);

 private:
  // Depends on random numbers: keys may be from a file.
  struct KeyHash {
    std::size_t operator()(const Key& key) const;
  };
  std::size_t position_of(const Key& key) const;  // size() if there is none

  std::vector<Entry> entries_;
  std::unordered_map<Key, std::size_t, KeyHash> positions_;  // of all entries, if there are more than a few
};

/// The dict that is saved or loaded, by name.
using StateDict = Dict;

/// Returns the value as Python prints it, tensors by dtype and shape: "{'w': <float32 tensor [2, 3]>, 'betas': (0.9,
/// 0.999)}". For humans. Truncated after about `limit` bytes and then followed by "...".
std::string to_string(const Value& value, std::size_t limit = SIZE_MAX);

/// Returns whether both tensors have the same dtype, sizes and elements, bit for bit, on whatever device. Ignores
/// strides and requires_grad. Tensors that are not strided are equal only if they are the same tensor.
bool same_bits(const at::Tensor& a, const at::Tensor& b);

namespace detail {

template <typename T>
inline constexpr ValueKind kKindOf = [] {
  static_assert(OneOf<T, bool, std::int64_t, double, std::string, Bytes, List, Tuple, Dict, at::Tensor, ShardedTensor,
                      NestedShardedTensor, std::shared_ptr<Checkpointable>, std::shared_ptr<const OpaqueObject>,
                      std::shared_ptr<Stateful>>,
                "not the type of any kind of Value");
  if constexpr (std::same_as<T, bool>) return ValueKind::boolean;
  if constexpr (std::same_as<T, std::int64_t>) return ValueKind::integer;
  if constexpr (std::same_as<T, double>) return ValueKind::floating;
  if constexpr (std::same_as<T, std::string>) return ValueKind::string;
  if constexpr (std::same_as<T, Bytes>) return ValueKind::bytes;
  if constexpr (std::same_as<T, List>) return ValueKind::list;
  if constexpr (std::same_as<T, Tuple>) return ValueKind::tuple;
  if constexpr (std::same_as<T, Dict>) return ValueKind::dict;
  if constexpr (std::same_as<T, at::Tensor>) return ValueKind::tensor;
  if constexpr (std::same_as<T, ShardedTensor>) return ValueKind::sharded_tensor;
  if constexpr (std::same_as<T, NestedShardedTensor>) return ValueKind::nested_sharded_tensor;
  if constexpr (std::same_as<T, std::shared_ptr<Checkpointable>>) return ValueKind::checkpointable;
  if constexpr (std::same_as<T, std::shared_ptr<const OpaqueObject>>) return ValueKind::opaque;
  return ValueKind::stateful;
}();

}  // namespace detail

template <typename T>
const T* Value::get_if() const {
  constexpr ValueKind wanted = detail::kKindOf<T>;
  const auto* found = std::get_if<static_cast<std::size_t>(wanted)>(&data_);
  if constexpr (detail::OneOf<T, List, Tuple, Dict, NestedShardedTensor>) {
    return found ? found->get() : nullptr;
  } else {
    return found;
  }
}

template <typename T>
T* Value::get_if() {
  static_assert(!std::same_as<T, NestedShardedTensor>, "a nested sharded tensor is shared and cannot be changed");
  return const_cast<T*>(std::as_const(*this).template get_if<T>());
}

template <typename T>
const T& Value::get() const {
  if (const T* found = get_if<T>()) return *found;
  refuse(detail::kKindOf<T>);
}

template <typename T>
T& Value::get() {
  if (T* found = get_if<T>()) return *found;
  refuse(detail::kKindOf<T>);
}

}  // namespace tessera
