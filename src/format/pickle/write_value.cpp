// Writer::value writes a tree as CPython's pickle.py would write its objects. Containers are memoized before they are
// filled. Tuples, frozen sets and calls cannot be: if one is in the memo once its parts are written, the parts are
// dropped and it is fetched.

#include <algorithm>

#include "format/pickle/opcodes.h"
#include "format/pickle/writer_memo.h"
#include "tessera/base/error.h"

namespace tessera::pickle {

namespace {

// The number of items that Python writes between a mark and its APPENDS or SETITEMS. Python also marks a single
// remaining item of a list or dict, but not of an object, whose length it does not know.
constexpr std::size_t kBatch = 1000;

// The opcode for a batch of one, of `size` in all: none except for that one.
std::uint8_t if_alone(std::size_t size, std::uint8_t opcode) { return size == 1 ? opcode : std::uint8_t{0}; }

bool is_remembered(NodeRef v) {
  switch (v.kind()) {
    case Kind::string:
    case Kind::bytes:
    case Kind::byte_array:
    case Kind::list:
    case Kind::dict:
    case Kind::set:
    case Kind::frozen_set:
    case Kind::global:
    case Kind::object:
      return true;
    case Kind::tuple:
      return !v.items().empty();
    default:
      return false;
  }
}

}  // namespace

struct Writer::Walk {
  Persistent persistent;
  const WalkLimits& limits;
  std::uint64_t nodes_left;
};

void Writer::value(NodeRef v, Persistent persistent, const WalkLimits& limits) {
  Walk walk{persistent, limits, limits.nodes};
  value_at(walk, v, 0);
}

bool Writer::is_known(NodeRef v) const { return memo_->nodes.contains(v.identity()); }

bool Writer::fetch(NodeRef v) {
  const auto known = memo_->nodes.find(v.identity());
  if (known == memo_->nodes.end()) return false;
  get(known->second);
  return true;
}

void Writer::remember(NodeRef v) { memo_->nodes.emplace(v.identity(), memoize()); }

void Writer::value_at(Walk& walk, NodeRef v, std::size_t depth) {
  if (depth > walk.limits.depth) {
    fail(ErrorCode::corrupt, "write pickle: nests deeper than the limit, expected at most {} levels",
         walk.limits.depth);
  }
  if (walk.nodes_left-- == 0) {
    fail(ErrorCode::corrupt, "write pickle: more nodes than the limit, expected at most {}", walk.limits.nodes);
  }
  if (is_remembered(v) && fetch(v)) return;
  switch (v.kind()) {
    case Kind::none:
      return none();
    case Kind::boolean:
      return boolean(v.boolean());
    case Kind::integer:
      return integer(v.integer());
    case Kind::big_integer:  // not remembered, as in Python
      charge(v.big_integer());
      return big_integer(v.big_integer());
    case Kind::floating:
      return floating(v.floating());
    case Kind::string:
      string(v.string());
      return remember(v);
    case Kind::bytes:
      bytes(v.bytes());
      return remember(v);
    case Kind::byte_array:
      charge(v.bytes());
      byte_array(v.bytes());
      return remember(v);
    case Kind::list:
      return list_at(walk, v, depth);
    case Kind::tuple:
      return tuple_at(walk, v, depth);
    case Kind::dict:
      empty_dict();
      remember(v);
      return set_all(walk, v.pairs(), depth, if_alone(v.pairs().size(), op::SETITEM), op::SETITEMS);
    case Kind::set:
    case Kind::frozen_set:
      return set_at(walk, v, depth);
    case Kind::global:
      memo_->nodes.emplace(v.identity(), push_global(v.global().module, v.global().name));
      return;
    case Kind::object:
      return object_at(walk, v, depth);
    case Kind::persistent_id:
      if (!walk.persistent || !walk.persistent(*this, v.persistent_id())) value_at(walk, v.persistent_id(), depth + 1);
      return persistent_id();
    case Kind::taken:
      fail(ErrorCode::invalid_argument,
           "write a pickled value: it contains a record that is kept elsewhere, expected none");
  }
}

void Writer::append_all(Walk& walk, std::span<const NodeRef> items, std::size_t depth, std::uint8_t one,
                        std::uint8_t several) {
  while (!items.empty()) {
    const auto batch = items.first(std::min(items.size(), kBatch));
    const bool alone = batch.size() == 1 && one != 0;
    if (!alone) mark();
    for (const NodeRef item : batch) value_at(walk, item, depth + 1);
    out_.push_back(alone ? one : several);
    items = items.subspan(batch.size());
  }
}

void Writer::set_all(Walk& walk, std::span<const Pair> pairs, std::size_t depth, std::uint8_t one,
                     std::uint8_t several) {
  while (!pairs.empty()) {
    const auto batch = pairs.first(std::min(pairs.size(), kBatch));
    const bool alone = batch.size() == 1 && one != 0;
    if (!alone) mark();
    for (const Pair& pair : batch) {
      value_at(walk, pair.key, depth + 1);
      value_at(walk, pair.value, depth + 1);
    }
    out_.push_back(alone ? one : several);
    pairs = pairs.subspan(batch.size());
  }
}

void Writer::list_at(Walk& walk, NodeRef v, std::size_t depth) {
  empty_list();
  remember(v);
  append_all(walk, v.items(), depth, if_alone(v.items().size(), op::APPEND), op::APPENDS);
}

void Writer::set_at(Walk& walk, NodeRef v, std::size_t depth) {
  const bool frozen = v.is(Kind::frozen_set);
  if (protocol_ >= 4 && !frozen) {
    empty_set();
    remember(v);
    return append_all(walk, v.items(), depth, 0, op::ADDITEMS);
  }
  if (protocol_ >= 4) {
    mark();
    for (const NodeRef item : v.items()) value_at(walk, item, depth + 1);
    if (is_known(v)) {
      out_.push_back(op::POP_MARK);
      fetch(v);
      return;
    }
    out_.push_back(op::FROZENSET);
    return remember(v);
  }
  interned_global("builtins", frozen ? "frozenset" : "set");
  empty_list();
  append_all(walk, v.items(), depth, if_alone(v.items().size(), op::APPEND), op::APPENDS);
  tuple(1);
  reduce();
  if (is_known(v)) {
    out_.push_back(op::POP);
    fetch(v);
    return;
  }
  remember(v);
}

void Writer::tuple_at(Walk& walk, NodeRef v, std::size_t depth) {
  const auto items = v.items();
  if (items.empty()) return tuple(0);
  const bool marked = items.size() > 3;
  if (marked) mark();
  for (const NodeRef item : items) value_at(walk, item, depth + 1);
  if (is_known(v)) {
    if (marked) {
      out_.push_back(op::POP_MARK);
    } else {
      out_.insert(out_.end(), items.size(), op::POP);
    }
    fetch(v);
    return;
  }
  if (marked) {
    tuple_from_mark();
  } else {
    tuple(items.size());
  }
  remember(v);
}

void Writer::object_at(Walk& walk, NodeRef v, std::size_t depth) {
  const Object& object = v.object();
  switch (object.made) {
    case Object::Made::reduce:
    case Object::Made::new_object:
      value_at(walk, object.callable, depth + 1);
      value_at(walk, object.arguments, depth + 1);
      out_.push_back(object.made == Object::Made::reduce ? op::REDUCE : op::NEWOBJ);
      break;
    case Object::Made::new_object_ex:
      if (protocol_ < 4) interned_global("copyreg", "__newobj_ex__");
      value_at(walk, object.callable, depth + 1);
      value_at(walk, object.arguments, depth + 1);
      value_at(walk, object.keyword_arguments(), depth + 1);
      if (protocol_ < 4) {
        tuple(3);
        reduce();
      } else {
        out_.push_back(op::NEWOBJ_EX);
      }
      break;
    case Object::Made::instance:
      mark();
      value_at(walk, object.callable, depth + 1);
      for (const NodeRef argument : object.arguments.items()) value_at(walk, argument, depth + 1);
      out_.push_back(op::OBJ);
      break;
    case Object::Made::extension:
      extension(static_cast<std::uint64_t>(object.callable.integer()));
      break;
  }
  if (is_known(v)) {
    out_.push_back(op::POP);
    fetch(v);
    return;
  }
  remember(v);
  append_all(walk, object.list_items(), depth, op::APPEND, op::APPENDS);
  set_all(walk, object.dict_items(), depth, op::SETITEM, op::SETITEMS);
  const std::size_t states = object.state_count();
  for (std::size_t i = 0; i < states; ++i) {
    value_at(walk, states == 1 ? object.state : object.state.items()[i], depth + 1);
    build();
  }
  for (const NodeRef call : object.setter_calls()) {
    value_at(walk, call, depth + 1);
    out_.push_back(op::POP);
  }
}

}  // namespace tessera::pickle
