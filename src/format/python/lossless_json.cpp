// The lossless JSON form. A value without a JSON equivalent is an object tagged by the member "__tessera__". A dict
// that has this key itself is written as pairs.

#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>

#include "format/json/object.h"
#include "format/pickle/integer.h"
#include "format/pickle/walk.h"
#include "format/python/base64.h"
#include "format/python/text.h"
#include "tessera/format/internal/pickle_text.h"
#include "tessera/format/internal/python_meaning.h"
#include "tessera/format/python_value.h"

namespace tessera::pickle {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kTag = "__tessera__";

Json tagged(std::string_view tag) { return {{std::string(kTag), std::string(tag)}}; }

Json tagged(std::string_view tag, const char* member, Json value) {
  Json json = tagged(tag);
  json[member] = std::move(value);
  return json;
}

class ToLossless {
 public:
  // Requires a value that is understood in every part.
  Json of(NodeRef v) {
    switch (meaning_of(v)) {
      case Meaning::ordered_dict: {
        const Object& object = v.object();
        Json json = tagged("OrderedDict", "items", pairs_of(v, object.dict_items()));
        if (object.has_state) json["state"] = of(object.state);
        return json;
      }
      case Meaning::size:
        return tagged("torch.Size", "items", items_of(v, size_items(v)));
      case Meaning::dtype:
        return tagged("dtype", "name", dtype_text(v));
      case Meaning::device: {
        const Device device = device_of(v);
        walk_.copy_text(device.type, device.type.size());
        Json json = tagged("device", "type", of_string(device.type));
        if (!device.index.is_none()) json["index"] = of(device.index);
        return json;
      }
      case Meaning::complex: {
        const Complex complex = complex_of(v);
        Json json = tagged("complex", "real", of_float(complex.real));
        json["imag"] = of_float(complex.imaginary);
        return json;
      }
      default:
        return of_plain(v);
    }
  }

 private:
  Json of_plain(NodeRef v) {
    switch (v.kind()) {
      case Kind::boolean:
        return v.boolean();
      case Kind::integer:
        return v.integer();
      case Kind::big_integer:
        walk_.copy_text(v.big_integer(), 3 * v.big_integer().size());
        return tagged("int", "value", integer_to_decimal(v));
      case Kind::floating:
        return of_float(v.floating());
      case Kind::string:
        walk_.copy_text(v.string(), v.string().size());
        return of_string(v.string());
      case Kind::bytes:
        walk_.copy_text(v.bytes(), v.bytes().size());
        return tagged("bytes", "base64", base64_encode(v.bytes()));
      case Kind::byte_array:
        walk_.copy_text(v.bytes(), v.bytes().size());
        return tagged("bytearray", "base64", base64_encode(v.bytes()));
      case Kind::list:
        return items_of(v, v.items());
      case Kind::tuple:
      case Kind::set:
      case Kind::frozen_set:
        return tagged(kind_name(v.kind()), "items", items_of(v, v.items()));
      case Kind::dict:
        return of_dict(v);
      default:
        return nullptr;
    }
  }

  static Json of_float(double value) {
    if (std::isfinite(value)) return value;
    Json json = tagged("float", "value", float_repr(value));
    if (std::isnan(value)) json["bits"] = std::bit_cast<std::uint64_t>(value);
    return json;
  }

  static Json of_string(std::string_view text) {
    if (is_utf8(text)) return std::string(text);
    return tagged("str", "base64", base64_encode(as_bytes(text)));
  }

  Json of_dict(NodeRef v) {
    bool is_plain = true;
    for (const Pair& pair : v.pairs()) {
      is_plain = is_plain && pair.key.is(Kind::string) && pair.key.string() != kTag && is_utf8(pair.key.string());
    }
    if (!is_plain) return tagged("dict", "items", pairs_of(v, v.pairs()));
    const Walk::Step step(walk_, v, 2 * v.pairs().size());
    JsonObject object;
    for (const Pair& pair : v.pairs()) {
      walk_.copy_text(pair.key.string(), pair.key.string().size());
      object.set(std::string(pair.key.string()), of(pair.value));
    }
    return object.take();
  }

  Json items_of(NodeRef v, std::span<const NodeRef> items) {
    Json array = Json::array();
    if (items.empty()) return array;
    const Walk::Step step(walk_, v, items.size());
    for (const NodeRef item : items) array.push_back(of(item));
    return array;
  }

  Json pairs_of(NodeRef v, std::span<const Pair> pairs) {
    Json array = Json::array();
    if (pairs.empty()) return array;
    const Walk::Step step(walk_, v, 2 * pairs.size());
    for (const Pair& pair : pairs) {
      Json both = Json::array();
      both.push_back(of(pair.key));
      both.push_back(of(pair.value));
      array.push_back(std::move(both));
    }
    return array;
  }

  Walk walk_{"JSON of a pickled value"};
};

class FromLossless {
 public:
  explicit FromLossless(Tree& tree) : tree_(tree) {}

  NodeRef of(const Json& json, std::size_t depth) {
    if (depth > WalkLimits().depth)
      fail_json("nests deeper than the limit, expected at most {} levels", WalkLimits().depth);
    switch (json.type()) {
      case Json::value_t::null:
        return NodeRef();
      case Json::value_t::boolean:
        return tree_.make_boolean(json.get<bool>());
      case Json::value_t::number_integer:
        return tree_.make_integer(json.get<std::int64_t>());
      case Json::value_t::number_unsigned:
        if (json.get<std::uint64_t>() > INT64_MAX)
          fail_json("the number {} is too large, expected at most 2^63 - 1", json.get<std::uint64_t>());
        return tree_.make_integer(json.get<std::int64_t>());
      case Json::value_t::number_float:
        return tree_.make_floating(json.get<double>());
      case Json::value_t::string:
        return tree_.make_string(json.get_ref<const std::string&>());
      case Json::value_t::array:
        return tree_.make_list(items(json, depth));
      case Json::value_t::object:
        return json.contains(kTag) ? of_tagged(json, depth) : of_object(json, depth);
      default:
        fail_json("found a value of type {}, expected a value of JSON", json.type_name());
    }
  }

 private:
  template <typename... Args>
  [[noreturn]] static void fail_json(fmt::format_string<Args...> format, Args&&... args) {
    throw Error(ErrorCode::corrupt, "read a value from JSON: " + fmt::format(format, std::forward<Args>(args)...));
  }

  NodeRef of_object(const Json& json, std::size_t depth) {
    std::vector<NodeRef> all;
    for (const auto& [key, value] : json.items()) {
      all.push_back(tree_.make_string(key));
      all.push_back(of(value, depth + 1));
    }
    const NodeRef dict = tree_.make_dict();
    tree_.set_items(dict, all);
    return dict;
  }

  NodeRef of_tagged(const Json& json, std::size_t depth) {
    const std::string& tag = text(json, kTag);
    if (tag == "tuple") return tree_.make_tuple(items(member(json, "items"), depth));
    if (tag == "frozenset") return tree_.make_frozen_set(items(member(json, "items"), depth));
    if (tag == "set") {
      const NodeRef set = tree_.make_set();
      tree_.append(set, items(member(json, "items"), depth));
      return set;
    }
    if (tag == "dict") {
      const NodeRef dict = tree_.make_dict();
      tree_.set_items(dict, pairs(member(json, "items"), depth));
      return dict;
    }
    if (tag == "int") return integer(text(json, "value"));
    if (tag == "float") return floating(json);
    if (tag == "str") return string(base64(json));
    if (tag == "bytes") return tree_.make_bytes(base64(json));
    if (tag == "bytearray") return tree_.make_byte_array(base64(json));
    if (tag == "dtype") return dtype(text(json, "name"));
    return of_tagged_call(tag, json, depth);
  }

  NodeRef of_tagged_call(const std::string& tag, const Json& json, std::size_t depth) {
    if (tag == "torch.Size") {
      const NodeRef sizes = tree_.make_tuple(items(member(json, "items"), depth));
      return known(call("torch", "Size", {sizes}), Meaning::size, tag, "items of ints");
    }
    if (tag == "device") {
      std::vector<NodeRef> arguments = {of(member(json, "type"), depth + 1)};
      if (json.contains("index")) arguments.push_back(of(json["index"], depth + 1));
      return known(call("torch", "device", arguments), Meaning::device, tag, "a type as string and an index as int");
    }
    if (tag == "complex") {
      const NodeRef real = of(member(json, "real"), depth + 1);
      const NodeRef imaginary = of(member(json, "imag"), depth + 1);
      return known(call("builtins", "complex", {real, imaginary}), Meaning::complex, tag, "real and imag as floats");
    }
    if (tag == "OrderedDict") {
      const NodeRef dict = call("collections", "OrderedDict", {});
      tree_.set_items(dict, pairs(member(json, "items"), depth));
      if (json.contains("state")) tree_.set_state(dict, of(json["state"], depth + 1));
      return known(dict, Meaning::ordered_dict, tag, "items and at most a state that is a dict");
    }
    fail_json("unknown tag \"{}\", expected one of tessera such as \"tuple\"", printable(tag));
  }

  NodeRef call(std::string_view module, std::string_view name, const std::vector<NodeRef>& arguments) {
    const NodeRef callable = tree_.make_global(module, name);
    return tree_.make_object(Object::Made::reduce, callable, tree_.make_tuple(arguments));
  }

  static NodeRef known(NodeRef value, Meaning meaning, std::string_view tag, std::string_view expected) {
    if (meaning_of(value) != meaning) fail_json("a malformed {}, expected {}", tag, expected);
    return value;
  }

  static const Json& member(const Json& json, std::string_view name) {
    const auto found = json.find(name);
    if (found == json.end())
      fail_json("\"{}\" has no \"{}\", expected this member", printable(json[kTag].get<std::string>()), name);
    return *found;
  }

  static const std::string& text(const Json& json, std::string_view name) {
    const Json& found = member(json, name);
    if (!found.is_string()) fail_json("\"{}\" is {}, expected a string", name, found.type_name());
    return found.get_ref<const std::string&>();
  }

  std::vector<NodeRef> items(const Json& json, std::size_t depth) {
    if (!json.is_array()) fail_json("\"items\" is {}, expected an array", json.type_name());
    std::vector<NodeRef> result;
    result.reserve(json.size());
    for (const Json& item : json) result.push_back(of(item, depth + 1));
    return result;
  }

  std::vector<NodeRef> pairs(const Json& json, std::size_t depth) {
    if (!json.is_array()) fail_json("\"items\" is {}, expected an array", json.type_name());
    std::vector<NodeRef> result;
    result.reserve(2 * json.size());
    for (const Json& both : json) {
      if (!both.is_array() || both.size() != 2)
        fail_json("an item is {} of size {}, expected a pair of key and value", both.type_name(), both.size());
      result.push_back(of(both[0], depth + 1));
      result.push_back(of(both[1], depth + 1));
    }
    return result;
  }

  static Bytes base64(const Json& json) {
    const std::string& encoded = text(json, "base64");
    auto bytes = base64_decode(encoded);
    if (!bytes) fail_json("malformed base64 \"{}\", expected padded base64", printable(encoded));
    return std::move(*bytes);
  }

  NodeRef integer(const std::string& digits) {
    const auto bytes = parse_integer(digits);
    if (!bytes) fail_json("\"{}\" is not an int, expected one of at most {} digits", printable(digits), kMostDigits);
    return tree_.make_big_integer(*bytes);
  }

  NodeRef floating(const Json& json) {
    if (const auto bits = json.find("bits"); bits != json.end()) {
      if (!bits->is_number_unsigned())
        fail_json("the bits of a float are {}, expected an unsigned number", bits->type_name());
      return tree_.make_floating(std::bit_cast<double>(bits->get<std::uint64_t>()));
    }
    const auto value = parse_float(text(json, "value"));
    if (!value) fail_json("\"{}\" is not a float, expected a number, inf or nan", printable(text(json, "value")));
    return tree_.make_floating(*value);
  }

  NodeRef string(const Bytes& utf8) {
    if (!is_python_utf8(as_text(utf8))) fail_json("the {} bytes of a str are not UTF-8, expected UTF-8", utf8.size());
    return tree_.make_string(as_text(utf8));
  }

  NodeRef dtype(std::string_view name) {
    const bool is_of_torch = name.starts_with("torch.");
    const NodeRef value = tree_.make_global("torch", is_of_torch ? name.substr(6) : "");
    return known(value, Meaning::dtype, "dtype", "a name of PyTorch such as torch.float32");
  }

  Tree& tree_;
};

}  // namespace

std::optional<Json> to_lossless_json(NodeRef value) {
  if (opaque_reason(value)) return std::nullopt;
  return ToLossless().of(value);
}

NodeRef from_lossless_json(const Json& json, Tree& tree) { return FromLossless(tree).of(json, 0); }

}  // namespace tessera::pickle
