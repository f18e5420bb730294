// equal walks two trees together. Two containers that are being compared, or were found equal, count as equal when they
// are paired again. This ends the walk of containers within themselves and visits shared parts once. Assumptions made
// while trying a key or set item that does not match are undone.

#include <algorithm>
#include <bit>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "format/pickle/walk.h"
#include "tessera/base/error.h"
#include "tessera/format/pickle_value.h"

namespace tessera::pickle {

namespace {

constexpr int kHashDepth = 3;
constexpr std::size_t kHashItems = 8;
constexpr std::size_t kTextPerNode = 64;  // bytes that take as long as a node

// Every hash here is made of these, so no file can be made whose keys collide; see text_hash.h.
std::size_t mix(std::size_t seed, std::size_t value) {
  const NumberHash number;
  return number(number(seed) + value);
}

class Comparison {
 public:
  explicit Comparison(const WalkLimits& limits) : limits_(limits), nodes_left_(limits.nodes) {}

  bool equal(NodeRef a, NodeRef b, std::size_t depth) {
    if (depth > limits_.depth) {
      fail(ErrorCode::corrupt, "compare pickled values: nests deeper than the limit, expected at most {} levels",
           limits_.depth);
    }
    charge(1);
    if (a.kind() != b.kind()) return false;
    switch (a.kind()) {
      case Kind::none:
        return true;
      case Kind::boolean:
        return a.boolean() == b.boolean();
      case Kind::integer:
        return a.integer() == b.integer();
      case Kind::big_integer:
        return equal_texts(as_text(a.big_integer()), as_text(b.big_integer()));
      case Kind::floating:
        return a.floating() == b.floating() ||
               std::bit_cast<std::uint64_t>(a.floating()) == std::bit_cast<std::uint64_t>(b.floating());
      case Kind::string:
        return equal_texts(a.string(), b.string());
      case Kind::bytes:
      case Kind::byte_array:
        return equal_texts(as_text(a.bytes()), as_text(b.bytes()));
      case Kind::global:
        return equal_texts(a.global().module, b.global().module) && equal_texts(a.global().name, b.global().name);
      default:
        break;
    }
    const Both both{a.identity(), b.identity()};
    if (!assumed_.insert(both).second) return true;
    assumptions_.push_back(both);
    return equal_containers(a, b, depth + 1);
  }

 private:
  struct Both {
    std::uint64_t a, b;
    bool operator==(const Both&) const = default;
  };
  struct BothHash {
    std::size_t operator()(const Both& both) const { return mix(both.a, both.b); }
  };

  // Two long texts are compared once.
  bool equal_texts(std::string_view a, std::string_view b) {
    if (a.size() != b.size()) return false;
    if (TextBudget::is_short(a.size())) return a == b;
    const Both both{reinterpret_cast<std::uint64_t>(a.data()), reinterpret_cast<std::uint64_t>(b.data())};
    const auto known = equal_texts_.find(both);
    if (known != equal_texts_.end() && known->second == a.size()) return true;
    texts_.charge_both(a, b, "compare pickled values");
    if (a != b) return false;
    equal_texts_[both] = a.size();
    return true;
  }

  bool equal_containers(NodeRef a, NodeRef b, std::size_t depth) {
    switch (a.kind()) {
      case Kind::list:
      case Kind::tuple:
        return equal_items(a.items(), b.items(), depth);
      case Kind::set:
      case Kind::frozen_set:
        return contains_all(a.items(), b.items(), depth) && contains_all(b.items(), a.items(), depth);
      case Kind::dict:
        return equal_dicts(a.pairs(), b.pairs(), depth);
      case Kind::persistent_id:
        return equal(a.persistent_id(), b.persistent_id(), depth);
      case Kind::taken:
        return a.same(b);
      default:
        return equal_objects(a.object(), b.object(), depth);
    }
  }

  bool equal_items(std::span<const NodeRef> a, std::span<const NodeRef> b, std::size_t depth) {
    if (a.size() != b.size()) return false;
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (!equal(a[i], b[i], depth)) return false;
    }
    return true;
  }

  bool equal_pairs(std::span<const Pair> a, std::span<const Pair> b, std::size_t depth) {
    if (a.size() != b.size()) return false;
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (!equal(a[i].key, b[i].key, depth) || !equal(a[i].value, b[i].value, depth)) return false;
    }
    return true;
  }

  bool equal_objects(const Object& a, const Object& b, std::size_t depth) {
    return a.made == b.made && a.state_count() == b.state_count() && equal(a.callable, b.callable, depth) &&
           equal(a.arguments, b.arguments, depth) && equal(a.keyword_arguments(), b.keyword_arguments(), depth) &&
           equal(a.state, b.state, depth) && equal_items(a.list_items(), b.list_items(), depth) &&
           equal_pairs(a.dict_items(), b.dict_items(), depth) && equal_items(a.setter_calls(), b.setter_calls(), depth);
  }

  void charge(std::size_t nodes) {
    if (nodes > nodes_left_) {
      fail(ErrorCode::corrupt, "compare pickled values: more nodes than the limit, expected at most {}", limits_.nodes);
    }
    nodes_left_ -= nodes;
  }

  std::size_t hash_of(std::span<const NodeRef> items, std::size_t seed, int depth) {
    seed = mix(seed, items.size());
    if (depth == 0) return seed;
    for (const NodeRef item : items.first(std::min(items.size(), kHashItems)))
      seed = mix(seed, hash_of(item, depth - 1));
    return seed;
  }

  // Of the outermost levels and first items alone. The same key may be hashed again and again, so each time counts.
  std::size_t hash_of(NodeRef v, int depth) {
    charge(1);
    const auto seed = static_cast<std::size_t>(v.kind());
    const auto text = [&](std::string_view s) {
      charge(s.size() / kTextPerNode);
      return mix(seed, TextHash()(s));
    };
    switch (v.kind()) {
      case Kind::none:
        return seed;
      case Kind::boolean:
        return mix(seed, v.boolean() ? 1 : 0);
      case Kind::integer:
        return mix(seed, static_cast<std::size_t>(v.integer()));
      case Kind::big_integer:
        return text(as_text(v.big_integer()));
      case Kind::floating:
        return v.floating() == 0 ? seed : mix(seed, std::bit_cast<std::uint64_t>(v.floating()));
      case Kind::string:
        return text(v.string());
      case Kind::bytes:
      case Kind::byte_array:
        return text(as_text(v.bytes()));
      case Kind::list:
      case Kind::tuple:
        return hash_of(v.items(), seed, depth);
      case Kind::set:
      case Kind::frozen_set:
      case Kind::dict:
        return seed;  // order and duplicates do not count
      case Kind::global:
        return mix(text(v.global().module), text(v.global().name));
      case Kind::object:
        if (depth == 0) return seed;
        return mix(mix(seed, hash_of(v.object().callable, depth - 1)), hash_of(v.object().arguments, depth - 1));
      case Kind::persistent_id:
        return depth == 0 ? seed : mix(seed, hash_of(v.persistent_id(), depth - 1));
      case Kind::taken:
        return mix(seed, v.identity());
    }
    return seed;
  }

  // `equal`, and no trace of it where it is not.
  bool matches(NodeRef a, NodeRef b, std::size_t depth) {
    const std::size_t before = assumptions_.size();
    if (equal(a, b, depth)) return true;
    for (std::size_t i = before; i < assumptions_.size(); ++i) assumed_.erase(assumptions_[i]);
    assumptions_.resize(before);
    return false;
  }

  bool contains_all(std::span<const NodeRef> items, std::span<const NodeRef> in, std::size_t depth) {
    std::unordered_multimap<std::size_t, NodeRef> index;
    for (const NodeRef item : in) index.emplace(hash_of(item, kHashDepth), item);
    for (const NodeRef item : items) {
      auto [candidate, last] = index.equal_range(hash_of(item, kHashDepth));
      while (candidate != last && !matches(item, candidate->second, depth)) ++candidate;
      if (candidate == last) return false;
    }
    return true;
  }

  // The pairs that count: among equal keys the last one.
  using Index = std::unordered_multimap<std::size_t, const Pair*>;
  Index index_of(std::span<const Pair> pairs, std::size_t depth) {
    Index index;
    for (const Pair& pair : pairs) {
      const std::size_t hash = hash_of(pair.key, kHashDepth);
      if (const Pair** known = find(index, hash, pair.key, depth)) {
        *known = &pair;
      } else {
        index.emplace(hash, &pair);
      }
    }
    return index;
  }

  const Pair** find(Index& index, std::size_t hash, NodeRef key, std::size_t depth) {
    auto [candidate, last] = index.equal_range(hash);
    for (; candidate != last; ++candidate) {
      if (matches(key, candidate->second->key, depth)) return &candidate->second;
    }
    return nullptr;
  }

  bool equal_dicts(std::span<const Pair> a, std::span<const Pair> b, std::size_t depth) {
    Index index_a = index_of(a, depth);
    Index index_b = index_of(b, depth);
    if (index_a.size() != index_b.size()) return false;
    for (const auto& [hash, pair] : index_a) {
      const Pair** other = find(index_b, hash, pair->key, depth);
      if (other == nullptr || !equal(pair->value, (*other)->value, depth)) return false;
    }
    return true;
  }

  WalkLimits limits_;
  std::uint64_t nodes_left_;
  TextBudget texts_;
  std::unordered_map<Both, std::size_t, BothHash> equal_texts_;  // by address, with their size
  std::unordered_set<Both, BothHash> assumed_;
  std::vector<Both> assumptions_;
};

}  // namespace

bool equal(NodeRef a, NodeRef b, const WalkLimits& limits) { return Comparison(limits).equal(a, b, 0); }

}  // namespace tessera::pickle
