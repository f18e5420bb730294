#include "checkpoint/source/torch/flatten.h"

#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/format/python_value.h"
#include "tessera/format/torch_archive.h"

namespace tessera::checkpoint {
using pickle::Kind;
using pickle::NodeRef;
namespace {

constexpr std::size_t kMaxFlattenedDepth = 200;
constexpr std::size_t kShownKeyBytes = 1000;  // of a key that is no str

// Returns the key-value pairs of a value that is a Mapping in Python.
std::optional<std::span<const pickle::Pair>> as_mapping(NodeRef value) {
  if (value.is(Kind::dict)) return value.pairs();
  if (!value.is(Kind::object)) return std::nullopt;
  const pickle::Object& object = value.object();
  if (object.calls("collections", "OrderedDict") || object.calls("collections", "defaultdict")) {
    return object.dict_items();
  }
  return std::nullopt;
}

}  // namespace

std::string name_of_path(const Path& path) {
  std::string name;
  for (std::size_t i = 0; i < path.size(); ++i) {
    if (i > 0) name += '.';
    if (const auto* key = std::get_if<std::string>(&path[i])) {
      name += *key;
    } else {
      name += std::to_string(std::get<std::int64_t>(path[i]));
    }
  }
  return name;
}

bool StateFlattener::is_sequence(NodeRef value) const {
  return value.is(Kind::list) || (tuples_ == Tuples::are_flattened && value.is(Kind::tuple));
}

void StateFlattener::check_depth(std::size_t depth) const {
  if (depth <= kMaxFlattenedDepth) return;
  fail(ErrorCode::unsupported, "{0}: the state is nested deeper than {1} levels, expected at most {1}", where_,
       kMaxFlattenedDepth);
}

bool StateFlattener::is_terminal(NodeRef value, std::size_t depth) {
  check_depth(depth);
  if (as_mapping(value)) return false;
  if (!is_sequence(value)) return true;
  const auto [known, is_new] = terminal_.try_emplace(value.identity(), true);
  if (!is_new) return known->second;
  for (const NodeRef item : value.items()) {
    const bool leads_on = (as_mapping(item) || is_sequence(item)) && !is_terminal(item, depth + 1);
    if (leads_on || torch_archive::is_tensor_like(item)) return terminal_[value.identity()] = false;
  }
  return true;
}

// A pickle can define a container once and refer to it often.
void StateFlattener::charge(const Path& at) {
  std::uint64_t bytes = sizeof(TensorInfo);
  for (const Key& item : at) {
    const auto* key = std::get_if<std::string>(&item);
    bytes += sizeof(item) + 2 * (key == nullptr ? 0 : key->size());
  }
  charge(bytes);
}

void StateFlattener::charge(std::uint64_t bytes) {
  if (budget_.charge(bytes)) return;
  fail(ErrorCode::corrupt,
       "{}: the flattened state takes more than {}, expected at most 64 MiB or 16 times the files; it repeats the "
       "same containers many times",
       where_, format_bytes(budget_.limit_bytes()));
}

// Returns the place of the value of a mapping. What is kept of a key is charged for each value.
LeafPlace StateFlattener::at_key(const LeafPlace& at, NodeRef key) {
  LeafPlace place = at;
  if (key.is(Kind::string)) {
    place.path.emplace_back(std::string(key.string()));
    return place;
  }
  std::string text, json;
  if (key.is(Kind::integer)) {
    text = json = std::to_string(key.integer());
  } else {
    with_context([&] { return fmt::format("{}: a key in '{}'", where_, printable(name_of_path(at.path))); },
                 [&] {
                   text = pickle::repr(key, kShownKeyBytes);
                   if (const auto lossless = pickle::to_lossless_json(key)) json = lossless->dump();
                 });
  }
  place.path.emplace_back(std::move(text));
  PathKeys keys = at.keys ? *at.keys : PathKeys();
  keys.push_back({at.path.size(), std::move(json)});
  std::uint64_t bytes = 0;
  for (const PathKey& kept : keys) bytes += kept.json.size();
  charge(bytes);
  place.keys = std::make_shared<const PathKeys>(std::move(keys));
  return place;
}

void StateFlattener::flatten(NodeRef value, const LeafPlace& at, const Leaf& leaf, std::size_t depth) {
  charge(at.path);
  check_depth(depth);
  if (const auto pairs = as_mapping(value)) {
    // An empty mapping has no leaves. Keep it as an object, so that it is not lost.
    if (pairs->empty() && !at.path.empty()) return leaf(value, at);
    for (const pickle::Pair& pair : *pairs) flatten(pair.value, at_key(at, pair.key), leaf, depth + 1);
  } else if (is_sequence(value) && !is_terminal(value, 0)) {
    const auto items = value.items();
    for (std::size_t i = 0; i < items.size(); ++i) {
      LeafPlace next = at;
      next.path.emplace_back(static_cast<std::int64_t>(i));
      flatten(items[i], next, leaf, depth + 1);
    }
  } else {
    leaf(value, at);
  }
}

}  // namespace tessera::checkpoint
