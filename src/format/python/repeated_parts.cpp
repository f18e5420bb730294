#include "tessera/format/internal/repeated_parts.h"

#include <algorithm>

#include "format/pickle/walk.h"
#include "tessera/base/error.h"
#include "tessera/format/internal/python_meaning.h"

namespace tessera::pickle {

namespace {

constexpr std::uint64_t kBytesPerValue = 16;
constexpr std::uint64_t kTimesNew = 8;  // as in SharingBudget
constexpr std::size_t kFixedParts = 4;  // of an object: callable, arguments, keyword arguments, state

std::size_t count_parts(NodeRef v) {
  switch (v.kind()) {
    case Kind::dict:
      return 2 * v.pairs().size();
    case Kind::object: {
      const Object& object = v.object();
      return kFixedParts + object.list_items().size() + 2 * object.dict_items().size() + object.setter_calls().size();
    }
    case Kind::persistent_id:
      return 1;
    default:
      return v.items().size();
  }
}

template <typename Visit>
void for_each_part(NodeRef v, const Visit& visit) {
  const auto visit_all = [&](std::span<const NodeRef> items) {
    for (const NodeRef item : items) visit(item);
  };
  const auto visit_pairs = [&](std::span<const Pair> pairs) {
    for (const Pair& pair : pairs) {
      visit(pair.key);
      visit(pair.value);
    }
  };
  switch (v.kind()) {
    case Kind::dict:
      return visit_pairs(v.pairs());
    case Kind::object: {
      const Object& object = v.object();
      visit(object.callable);
      visit(object.arguments);
      visit(object.keyword_arguments());
      visit(object.state);
      visit_all(object.list_items());
      visit_pairs(object.dict_items());
      return visit_all(object.setter_calls());
    }
    case Kind::persistent_id:
      return visit(v.persistent_id());
    default:
      return visit_all(v.items());
  }
}

// Visits what `repr` and JSON print, as they do.
class Printed {
 public:
  void visit(NodeRef v) {
    switch (meaning_of(v)) {
      case Meaning::ordered_dict:
        return visit_container(v, {}, v.object().dict_items(), v.object().state);
      case Meaning::size:
        return visit_container(v, size_items(v), {}, NodeRef());
      case Meaning::device:
        return copy_text(as_bytes(device_of(v).type));
      case Meaning::plain:
        return visit_plain(v);
      case Meaning::opaque:
        if (v.is(Kind::persistent_id)) {
          const NodeRef id = v.persistent_id();
          visit_container(v, std::span(&id, 1), {}, NodeRef());
        }
        return;
      default:
        return;
    }
  }

  const Walk& walk() const { return walk_; }

 private:
  void visit_plain(NodeRef v) {
    switch (v.kind()) {
      case Kind::string:
        return copy_text(as_bytes(v.string()));
      case Kind::bytes:
      case Kind::byte_array:
        return copy_text(v.bytes());
      case Kind::big_integer:
        return copy_text(v.big_integer());
      case Kind::list:
      case Kind::tuple:
      case Kind::set:
      case Kind::frozen_set:
        return visit_container(v, v.items(), {}, NodeRef());
      case Kind::dict:
        return visit_container(v, {}, v.pairs(), NodeRef());
      default:
        return;
    }
  }

  void visit_container(NodeRef v, std::span<const NodeRef> items, std::span<const Pair> pairs, NodeRef state) {
    if (items.empty() && pairs.empty() && state.is_none()) return;
    const Walk::Step step(walk_, v, items.size() + 2 * pairs.size());
    if (!step.entered()) return;
    for (const NodeRef item : items) visit(item);
    for (const Pair& pair : pairs) {
      visit(pair.key);
      visit(pair.value);
    }
    visit(state);
  }

  void copy_text(ByteView text) { walk_.copy_text(text, text.size()); }

  Walk walk_{"count the parts of a pickled value"};
};

}  // namespace

std::uint64_t RepeatedParts::count(NodeRef value, std::uint64_t limit_bytes) {
  ++value_;
  limit_bytes_ = limit_bytes;
  repeated_bytes_ = new_values_ = new_text_bytes_ = 0;
  has_shared_parts_ = false;
  visit(value, 0);
  return repeated_bytes_;
}

std::uint64_t RepeatedParts::within(NodeRef value) {
  RepeatedParts parts;
  parts.count(value, UINT64_MAX);
  return parts.has_shared_parts_ ? parts.count_printed(value) : 0;
}

// Every part of the value once. What is deeper than the limit of all walks is refused by each of them.
void RepeatedParts::visit(NodeRef v, std::size_t depth) {
  if (repeated_bytes_ > limit_bytes_ || depth > WalkLimits().depth) return;
  switch (v.kind()) {
    case Kind::none:
    case Kind::boolean:
    case Kind::integer:
    case Kind::floating:
    case Kind::taken:
      return;
    case Kind::string:
      return visit_text(v.string());
    case Kind::bytes:
    case Kind::byte_array:
      return visit_text(as_text(v.bytes()));
    case Kind::big_integer:
      return visit_text(as_text(v.big_integer()));
    case Kind::global:
      visit_text(v.global().module);
      return visit_text(v.global().name);
    default:
      break;
  }
  const std::uint64_t parts = count_parts(v);
  if (parts == 0) return;
  if (!enter(v.identity(), new_values_, parts + 1, kBytesPerValue * (parts + 1))) return;
  for_each_part(v, [&](NodeRef part) { visit(part, depth + 1); });
}

// Returns whether the current value did not have this part before. Then counts it: as new, or as repeated.
bool RepeatedParts::enter(std::uint64_t identity, std::uint64_t& new_amount, std::uint64_t amount,
                          std::uint64_t bytes) {
  const auto [known, is_new] = seen_.try_emplace(identity, value_);
  if (is_new) {
    new_amount += amount;
    return true;
  }
  if (known->second == value_) {
    has_shared_parts_ = true;
    return false;
  }
  known->second = value_;
  repeated_bytes_ += bytes;
  return true;
}

// An address has another highest byte than the identity of a container.
void RepeatedParts::visit_text(std::string_view text) {
  if (TextBudget::is_short(text.size())) return;
  enter(reinterpret_cast<std::uint64_t>(text.data()), new_text_bytes_, text.size(), text.size());
}

// Requires that `value` is the only one that was counted.
std::uint64_t RepeatedParts::count_printed(NodeRef value) const {
  Printed printed;
  try {
    printed.visit(value);
  } catch (const Error&) {  // it has too many parts or nests too deep, and `repr` and JSON throw as well
  }
  const auto beyond = [](std::uint64_t repeated, std::uint64_t is_new) {
    return repeated - std::min(repeated, kTimesNew * is_new);
  };
  return kBytesPerValue * beyond(printed.walk().repeated_values(), new_values_) +
         beyond(printed.walk().repeated_text_bytes(), new_text_bytes_);
}

}  // namespace tessera::pickle
