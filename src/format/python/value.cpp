#include "tessera/format/python_value.h"

#include <unordered_set>

#include "format/pickle/walk.h"
#include "tessera/base/error.h"
#include "tessera/format/internal/python_meaning.h"

namespace tessera::pickle {

namespace {

constexpr int kMostCalls = 4;                 // of a chain of calls that a name shows
constexpr std::size_t kMostSizeItems = 1000;  // of a torch.Size; a tensor has far fewer dimensions

bool all_are(std::span<const NodeRef> items, Kind kind) {
  for (const NodeRef item : items) {
    if (!item.is(kind)) return false;
  }
  return true;
}

// The object was not modified after the call.
bool is_bare(const Object& object) {
  return !object.has_state && object.list_items().empty() && object.dict_items().empty() &&
         object.setter_calls().empty();
}

Meaning meaning_of_call(const Object& object) {
  if (object.made != Object::Made::reduce || !object.callable.is(Kind::global) || !object.arguments.is(Kind::tuple))
    return Meaning::opaque;
  const auto arguments = object.arguments.items();
  if (object.calls("collections", "OrderedDict")) {
    const bool has_fields = object.has_state && (object.state_count() > 1 || !object.state.is(Kind::dict));
    const bool has_more = has_fields || !object.list_items().empty() || !object.setter_calls().empty();
    return arguments.empty() && !has_more ? Meaning::ordered_dict : Meaning::opaque;
  }
  if (!is_bare(object)) return Meaning::opaque;
  if (object.calls("torch", "Size")) {
    const bool is_size = arguments.size() == 1 && arguments[0].is(Kind::tuple) &&
                         arguments[0].items().size() <= kMostSizeItems && all_are(arguments[0].items(), Kind::integer);
    return is_size ? Meaning::size : Meaning::opaque;
  }
  if (object.calls("torch", "device")) {
    const bool has_type = !arguments.empty() && arguments[0].is(Kind::string);
    const bool has_index = arguments.size() == 2 && arguments[1].is(Kind::integer);
    return has_type && (arguments.size() == 1 || has_index) ? Meaning::device : Meaning::opaque;
  }
  if (object.calls("builtins", "complex"))
    return arguments.size() == 2 && all_are(arguments, Kind::floating) ? Meaning::complex : Meaning::opaque;
  return Meaning::opaque;
}

// Whether it is the call that reaches a dotted name.
bool is_getattr(const Object& object) {
  if (!object.calls("builtins", "getattr") || !object.arguments.is(Kind::tuple)) return false;
  const auto arguments = object.arguments.items();
  return arguments.size() == 2 && arguments[1].is(Kind::string) &&
         (arguments[0].is(Kind::global) || arguments[0].is(Kind::object));
}

std::string callable_name(NodeRef callable, int calls_left) {
  if (callable.is(Kind::global)) return printable(callable.global().module) + "." + printable(callable.global().name);
  if (!callable.is(Kind::object)) return "a " + std::string(kind_name(callable.kind()));
  const Object& object = callable.object();
  if (object.made == Object::Made::extension)
    return "extension " + (object.callable.is(Kind::integer) ? integer_to_decimal(object.callable) : "?");
  if (calls_left == 0) return "...";
  if (is_getattr(object)) {
    const auto arguments = object.arguments.items();
    return callable_name(arguments[0], calls_left - 1) + "." + printable(arguments[1].string());
  }
  return callable_name(object.callable, calls_left - 1) + "(...)";
}

// Why a value is opaque by itself; of a call, whoever makes it.
std::string own_reason(NodeRef value) {
  if (value.is(Kind::persistent_id)) return "refers to something outside of the pickle";
  if (value.is(Kind::taken)) return "was taken out of the tree";
  if (value.is(Kind::global)) return "is the global " + callable_name(value) + ", which is not imported";
  const Object& object = value.object();
  if (object.made == Object::Made::extension) return "is " + callable_name(value) + ", which is not looked up";
  return "calls " + callable_name(object.callable) + ", which is not executed";
}

class Search {
 public:
  std::optional<std::string> reason(NodeRef v) {
    if (meaning_of(v) == Meaning::opaque) return own_reason(v);
    switch (v.kind()) {
      case Kind::list:
      case Kind::tuple:
      case Kind::set:
      case Kind::frozen_set:
        return reason_in(v, v.items(), {}, NodeRef());
      case Kind::dict:
        return reason_in(v, {}, v.pairs(), NodeRef());
      case Kind::object:
        return reason_in(v, {}, v.object().dict_items(), v.object().state);
      default:
        return std::nullopt;
    }
  }

 private:
  std::optional<std::string> reason_in(NodeRef v, std::span<const NodeRef> items, std::span<const Pair> pairs,
                                       NodeRef state) {
    if (items.empty() && pairs.empty() && state.is_none()) return std::nullopt;
    if (understood_.contains(v.identity())) return std::nullopt;
    const Walk::Step step(walk_, v, 0);
    if (!step.entered()) return "contains itself";
    for (const NodeRef item : items) {
      if (auto found = reason(item)) return found;
    }
    for (const Pair& pair : pairs) {
      if (auto found = reason(pair.key)) return found;
      if (auto found = reason(pair.value)) return found;
    }
    if (auto found = reason(state)) return found;
    understood_.insert(v.identity());
    return std::nullopt;
  }

  Walk walk_{"look into a pickled value"};
  std::unordered_set<std::uint64_t, NumberHash> understood_;
};

}  // namespace

Meaning meaning_of(NodeRef value) {
  switch (value.kind()) {
    case Kind::global:
      return as_dtype(value) ? Meaning::dtype : Meaning::opaque;
    case Kind::object:
      return meaning_of_call(value.object());
    case Kind::persistent_id:
    case Kind::taken:
      return Meaning::opaque;
    default:
      return Meaning::plain;
  }
}

std::span<const NodeRef> size_items(NodeRef size) { return size.object().arguments.items()[0].items(); }

std::string dtype_text(NodeRef dtype) { return "torch." + std::string(dtype.global().name); }

Device device_of(NodeRef device) {
  const auto arguments = device.object().arguments.items();
  return {arguments[0].string(), arguments.size() == 2 ? arguments[1] : NodeRef()};
}

Complex complex_of(NodeRef value) {
  const auto arguments = value.object().arguments.items();
  return {arguments[0].floating(), arguments[1].floating()};
}

std::string callable_name(NodeRef callable) { return callable_name(callable, kMostCalls); }

std::string type_name(NodeRef value) {
  switch (meaning_of(value)) {
    case Meaning::ordered_dict:
      return "OrderedDict";
    case Meaning::size:
      return "torch.Size";
    case Meaning::dtype:
      return "dtype";
    case Meaning::device:
      return "device";
    case Meaning::complex:
      return "complex";
    case Meaning::plain:
      return value.is_none() ? "NoneType" : std::string(kind_name(value.kind()));
    case Meaning::opaque:
      break;
  }
  if (value.is(Kind::persistent_id) || value.is(Kind::taken)) return std::string(kind_name(value.kind()));
  const bool is_call = value.is(Kind::object) && value.object().made != Object::Made::extension;
  return callable_name(is_call ? value.object().callable : value);
}

std::optional<std::string> opaque_reason(NodeRef value) { return Search().reason(value); }

std::optional<DType> as_dtype(NodeRef value) {
  if (!value.is(Kind::global) || value.global().module != "torch") return std::nullopt;
  const auto found = find_dtype(value.global().name);
  // PyTorch does not pickle under aliases.
  if (!found || dtype_name(*found) != value.global().name) return std::nullopt;
  return found;
}

std::optional<std::vector<std::int64_t>> as_int_list(NodeRef value) {
  std::span<const NodeRef> items;
  if (value.is(Kind::tuple) || value.is(Kind::list)) {
    items = value.items();
  } else if (meaning_of(value) == Meaning::size) {
    items = size_items(value);
  } else {
    return std::nullopt;
  }
  if (!all_are(items, Kind::integer)) return std::nullopt;
  std::vector<std::int64_t> result;
  result.reserve(items.size());
  for (const NodeRef item : items) result.push_back(item.integer());
  return result;
}

}  // namespace tessera::pickle
