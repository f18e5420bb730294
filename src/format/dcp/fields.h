#pragma once
// Reads pickled dataclasses: NEWOBJ of the class without arguments, then BUILD with a dict of fields.
//
// Class and field names come from the memo and are usually the same nodes, so identity is compared first.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "format/dcp/input.h"
#include "format/dcp/names.h"

namespace tessera::dcp {

// Recognizes one class under all of its module paths.
class ClassReader {
 public:
  explicit ClassReader(Class what) : what_(what) {}

  bool is_instance(pickle::NodeRef value) {
    if (!value.is(pickle::Kind::object)) return false;
    return is_class(value.object().callable);
  }
  // Returns whether `value` is the class itself.
  bool is_class(pickle::NodeRef value) { return value.identity() == identity_ || learn(value); }

 private:
  bool learn(pickle::NodeRef value) {
    if (!value.is(pickle::Kind::global)) return false;
    for (std::size_t d = 0; d < kDialectCount; ++d) {
      if (value.global() != class_name(what_, static_cast<Dialect>(d))) continue;
      identity_ = value.identity();
      return true;
    }
    return false;
  }

  Class what_;
  std::uint64_t identity_ = kNoIdentity;
};

// The fields of an instance of `Fields::owner`.
template <typename Fields>
struct FoundFields {
  std::array<pickle::NodeRef, Fields::count> values{};  // None for an absent one
  std::uint32_t present = 0;

  bool has(std::size_t field) const { return (present >> field & 1) != 0; }
  pickle::NodeRef operator[](std::size_t field) const { return values[field]; }
};

template <typename Fields>
class FieldReader {
 public:
  explicit FieldReader(const Input& input) : input_(input) {}

  bool is_instance(pickle::NodeRef value) { return class_.is_instance(value); }

  // `value` must be an instance of the class. Calls `on_unknown(name, value)` for a field with another name.
  template <typename OnUnknown>
  FoundFields<Fields> read(pickle::NodeRef value, std::string_view name, OnUnknown&& on_unknown) {
    if (!is_instance(value)) input_.wrong_value(name, kClassName, value, fmt::format("an object of {}", kClassName));
    const pickle::Object& object = value.object();
    if (object.made != pickle::Object::Made::new_object || !object.arguments.is(pickle::Kind::tuple) ||
        !object.arguments.items().empty() || object.extra_address != 0) {
      input_.fail_at(ErrorCode::unsupported, name, kClassName, "an object made in another way",
                     "NEWOBJ without arguments and one BUILD");
    }
    FoundFields<Fields> found;
    if (!object.has_state) return found;
    if (!object.state.is(pickle::Kind::dict)) input_.wrong_value(name, kClassName, object.state, "a dict of fields");
    const std::span<const pickle::Pair> pairs = object.state.pairs();
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      const std::size_t field = field_of(pairs[i].key, i, name);
      if (field == kUnknown) {
        on_unknown(pairs[i].key.string(), pairs[i].value);
        continue;
      }
      if (found.has(field)) {
        input_.fail_at(ErrorCode::corrupt, name, kClassName,
                       fmt::format("the field '{}' twice", printable(pairs[i].key.string())), "it once");
      }
      found.present |= std::uint32_t{1} << field;
      found.values[field] = pairs[i].value;
    }
    return found;
  }

  // As above, for classes whose unknown fields cannot be kept.
  FoundFields<Fields> read(pickle::NodeRef value, std::string_view name) {
    return read(value, name, [&](std::string_view field, pickle::NodeRef) {
      input_.fail_at(ErrorCode::unsupported, name, kClassName, fmt::format("the unknown field '{}'", printable(field)),
                     "only fields that this version knows");
    });
  }

  // Throws unless all given fields are present.
  void require(const FoundFields<Fields>& found, std::initializer_list<std::size_t> fields,
               std::string_view name) const {
    for (const std::size_t field : fields) {
      if (found.has(field)) continue;
      input_.fail_at(ErrorCode::corrupt, name, kClassName, "no such field", fmt::format("'{}'", Fields::names[field]));
    }
  }

 private:
  static constexpr std::string_view kClassName = class_name(Fields::owner, Dialect::torch_2).name;
  static constexpr std::size_t kUnknown = SIZE_MAX;
  struct Seen {
    std::uint64_t identity = kNoIdentity;
    std::size_t field = kUnknown;
  };

  std::size_t field_of(pickle::NodeRef key, std::size_t position, std::string_view name) {
    if (position < seen_.size() && seen_[position].identity == key.identity()) {
      return seen_[position].field;
    }
    const std::string_view text = input_.string(key, name, kClassName);
    for (std::size_t field = 0; field < Fields::count; ++field) {
      if (Fields::names[field] != text) continue;
      if (position < seen_.size()) seen_[position] = {key.identity(), field};
      return field;
    }
    return kUnknown;
  }

  const Input& input_;
  ClassReader class_{Fields::owner};
  std::array<Seen, Fields::count> seen_{};  // the field at this position in the previous object
};

}  // namespace tessera::dcp
