#include "checkpoint/source/torch/flatten.h"

#include <algorithm>
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

void StateFlattener::charge(const LeafPlace& at, bool occurs_again) {
  std::uint64_t bytes = sizeof(TensorInfo);
  for (const Key& item : at.path) {
    const auto* key = std::get_if<std::string>(&item);
    bytes += sizeof(item) + 2 * (key == nullptr ? 0 : key->size());
  }
  // Where the last key is a str or an index, the keys are those of the container.
  if (at.keys && at.keys->back().part + 1 == at.path.size()) {
    for (const PathKey& kept : *at.keys) bytes += sizeof(kept) + kept.json.size();
  }
  charge(occurs_again ? bytes : bytes - std::min(bytes, kOwnBytes));
}

void StateFlattener::charge(std::uint64_t bytes) {
  if (budget_.charge(bytes)) return;
  fail(ErrorCode::corrupt,
       "{}: the flattened state takes more than {} for containers, tensors and long keys that occur often, expected "
       "at most 64 MiB or 16 times the files",
       where_, format_bytes(budget_.limit_bytes()));
}

// Returns the place of the value of a mapping.
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
    charge(key_parts_.count(key, budget_.left_bytes()));
    with_context([&] { return fmt::format("{}: a key in '{}'", where_, printable(name_of_path(at.path))); },
                 [&] {
                   text = pickle::repr(key, kShownKeyBytes);
                   if (const auto lossless = pickle::to_lossless_json(key)) json = lossless->dump();
                 });
  }
  place.path.emplace_back(std::move(text));
  PathKeys keys = at.keys ? *at.keys : PathKeys();
  keys.push_back({at.path.size(), std::move(json)});
  place.keys = std::make_shared<const PathKeys>(std::move(keys));
  return place;
}

void StateFlattener::flatten(NodeRef value, const LeafPlace& at, Leaf leaf, std::size_t depth, bool occurs_again) {
  charge(at, occurs_again);
  check_depth(depth);
  const auto occurred = [&] { return !flattened_.insert(value.identity()).second; };
  if (const auto pairs = as_mapping(value)) {
    // An empty mapping has no leaves. Keep it as an object, so that it is not lost.
    if (pairs->empty() && !at.path.empty()) return leaf(value, at);
    const bool again = occurred();
    for (const pickle::Pair& pair : *pairs) flatten(pair.value, at_key(at, pair.key), leaf, depth + 1, again);
  } else if (is_sequence(value) && !is_terminal(value, 0)) {
    const bool again = occurred();
    const auto items = value.items();
    for (std::size_t i = 0; i < items.size(); ++i) {
      LeafPlace next = at;
      next.path.emplace_back(static_cast<std::int64_t>(i));
      flatten(items[i], next, leaf, depth + 1, again);
    }
  } else {
    leaf(value, at);
  }
}

}  // namespace tessera::checkpoint
