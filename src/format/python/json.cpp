// to_json, for display. The lossless form is in lossless_json.cpp.

#include <cmath>
#include <nlohmann/json.hpp>

#include "format/json/object.h"
#include "format/pickle/walk.h"
#include "format/python/text.h"
#include "tessera/format/internal/pickle_text.h"
#include "tessera/format/internal/python_meaning.h"
#include "tessera/format/python_value.h"

namespace tessera::pickle {

namespace {

using Json = nlohmann::ordered_json;

// JSON text is UTF-8: a lone surrogate becomes the six characters of its repr in Python.
std::string json_text(std::string_view text) {
  if (is_utf8(text)) return std::string(text);
  std::string out;
  while (!text.empty()) {
    const std::string_view before = text;
    const char32_t c = take_code_point(text);
    const std::string_view character = before.substr(0, before.size() - text.size());
    if (is_surrogate(c)) {
      const std::string quoted = string_repr(character);
      out += quoted.substr(1, quoted.size() - 2);
    } else {
      out += character;
    }
  }
  return out;
}

class ToJson {
 public:
  Json of(NodeRef v) {
    switch (meaning_of(v)) {
      case Meaning::plain:
        return of_plain(v);
      case Meaning::ordered_dict:
        return of_pairs(v, v.object().dict_items());
      case Meaning::size:
        return of_items(v, size_items(v));
      case Meaning::dtype:
        return dtype_text(v);
      case Meaning::device: {
        const Device device = device_of(v);
        walk_.copy_text(device.type, device.type.size());
        const std::string index = device.index.is_none() ? "" : ":" + integer_to_decimal(device.index);
        return json_text(device.type) + index;
      }
      case Meaning::complex:
        return repr(v);
      case Meaning::opaque:
        break;
    }
    return nullptr;
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
        return integer_to_decimal(v);
      case Kind::floating:
        return std::isfinite(v.floating()) ? Json(v.floating()) : Json(float_repr(v.floating()));
      case Kind::string:
        walk_.copy_text(v.string(), v.string().size());
        return json_text(v.string());
      case Kind::bytes:
      case Kind::byte_array:
        walk_.copy_text(v.bytes(), v.bytes().size());
        return utf8_from_latin1(as_text(v.bytes()));
      case Kind::list:
      case Kind::tuple:
      case Kind::set:
      case Kind::frozen_set:
        return of_items(v, v.items());
      case Kind::dict:
        return of_pairs(v, v.pairs());
      default:
        return nullptr;
    }
  }

  Json of_items(NodeRef v, std::span<const NodeRef> items) {
    if (items.empty()) return Json::array();
    const Walk::Step step(walk_, v, items.size());
    if (!step.entered()) return nullptr;
    Json array = Json::array();
    for (const NodeRef item : items) array.push_back(of(item));
    return array;
  }

  Json of_pairs(NodeRef v, std::span<const Pair> pairs) {
    if (pairs.empty()) return Json::object();
    const Walk::Step step(walk_, v, 2 * pairs.size());
    if (!step.entered()) return nullptr;
    JsonObject object;
    for (const Pair& pair : pairs) object.set(key_text(pair.key), of(pair.value));
    return object.take();
  }

  std::string key_text(NodeRef key) {
    if (!key.is(Kind::string)) return json_text(repr_in(walk_, key));
    walk_.copy_text(key.string(), key.string().size());
    return json_text(key.string());
  }

  Walk walk_{"JSON of a pickled value"};
};

}  // namespace

Json to_json(NodeRef value) { return ToJson().of(value); }

}  // namespace tessera::pickle
