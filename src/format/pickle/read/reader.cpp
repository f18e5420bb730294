#include "tessera/format/pickle_reader.h"

#include <algorithm>

#include "format/pickle/read/fold.h"
#include "format/pickle/read/interpreter.h"
#include "tessera/format/internal/pickle_text.h"

namespace tessera::pickle {

void Interpreter::grow_stack() {
  const auto size = static_cast<std::size_t>(top_ - values_.data());
  const std::size_t capacity = std::max<std::size_t>(256, size + size / 2);
  values_.grow(capacity);
  depths_.grow(capacity);
  top_ = values_.data() + size;
  set_floor();
}

void Interpreter::set_items(std::size_t count) {
  need(1 + count);
  if (count % 2 != 0) fail("{} keys and values, expected an even number", count);
  const NodeRef target = top_[-1 - static_cast<std::ptrdiff_t>(count)];
  const NodeRef* pairs = top_ - count;
  const Depth depth = count == 0 ? 0 : depth_around(depths() - count, count);
  if (target.is(Kind::dict)) {
    nodes_.set_items(target, pairs, count / 2);
  } else if (target.is(Kind::object)) {
    nodes_.set_items_of_object(target, pairs, count / 2);
  } else {
    fail("sets items of {}, expected a dict or object", kind_name(target.kind()));
  }
  top_ -= count;
  depths()[-1] = std::max(depths()[-1], depth);
}

void Interpreter::build() {
  need(2);
  const NodeRef target = top_[-2];
  if (!target.is(Kind::object)) fail("sets the state of {}, expected an object", kind_name(target.kind()));
  const Depth depth = depth_around(depths() - 1, 1);
  nodes_.set_state(target, top_[-1]);
  --top_;
  depths()[-1] = std::max(depths()[-1], depth);
}

void Interpreter::call(Object::Made made) {
  need(2);
  const NodeRef callable = top_[-2];
  const NodeRef arguments = top_[-1];
  if (made == Object::Made::reduce && callable.is(Kind::global) && Nodes::fold_of(callable) != Fold::none) {
    if (const auto folded = fold_call(nodes_, callable, arguments)) return replace(2, *folded);
  }
  replace(2, nodes_.object(made, callable, arguments));
}

void Interpreter::put(std::uint64_t index) {
  need(1);
  // Each index was once the next one, so it is at most the number of opcodes before.
  const std::uint64_t offset = input_.offset_of(opcode_);
  if (index >= limits_.memo || index > offset)
    fail("memo index {} exceeds the limit, expected less than {}", index, std::min(limits_.memo, offset + 1));
  if (!memo_.can_put(index)) fail("memo index {} after records, expected the next index", index);
  memo_.put(index, top_[-1], depths()[-1]);
}

void Interpreter::get(std::uint64_t index) {
  const Memo::Entry* entry = memo_.get(index);
  if (entry == nullptr) fail("memo index {} was never put, expected one that was put before", index);
  push(entry->value, entry->depth);
}

NodeRef Interpreter::run(std::uint64_t& length_bytes) {
  const std::uint8_t* p = input_.begin();
  const std::uint8_t* end = input_.end();
  const std::uint8_t* margin = input_.window_margin();
  grow_stack();
  NodeRef* top = top_;
  NodeRef* base = values_.data();
  NodeRef* limit = base + values_.capacity();
  std::uint64_t left = limits_.items;
  const auto depth_at = [&](NodeRef* slot) -> Depth& { return depths_.data()[slot - base]; };
  // Hands the cursor and the stack to a member and takes them back.
  const auto with = [&](const std::uint8_t* opcode, auto&& member) {
    opcode_ = opcode;
    cursor_ = p;
    top_ = top;
    member();
    p = cursor_;
    top = top_;
  };
  const auto require = [&](const std::uint8_t* opcode, std::size_t count) {
    if (static_cast<std::size_t>(top - floor_) < count) with(opcode, [&] { fail_underflow(count); });
  };
  const auto push_value = [&](NodeRef value, Depth depth) {
    depth_at(top) = depth;
    *top++ = value;
  };
  const auto tuple = [&](const std::uint8_t* opcode, std::size_t count) {
    require(opcode, count);
    Depth depth = 0;
    for (std::size_t i = 1; i <= count; ++i) depth = std::max(depth, depth_at(top - i));
    if (depth >= depth_limit_) with(opcode, [&] { fail_depth(); });
    opcode_ = opcode;
    const NodeRef value = nodes_.tuple(top - count, count);
    top -= count;
    push_value(value, static_cast<Depth>(depth + 1));
  };
  const auto fetch = [&](const std::uint8_t* opcode, std::uint64_t index) {
    const Memo::Entry* const entry = memo_.get(index);
    if (entry == nullptr) return with(opcode, [&] { get(index); });
    if (taker_ != nullptr && entry->value.is(Kind::global)) {
      RecordCursor cursor(p, end, memo_, record_texts_);
      if (const std::optional<std::uint64_t> number = taker_->take(entry->value, cursor)) {
        p = cursor.accept(memo_);
        return push_value(Nodes::taken(*number), 0);
      }
    }
    push_value(entry->value, static_cast<Depth>(entry->depth));
  };
  const auto put_next = [&](const std::uint8_t* opcode, std::uint64_t index) {
    if (top != floor_ && index == memo_.next() && index < limits_.memo) {
      return memo_.append(top[-1], depth_at(top - 1));
    }
    with(opcode, [&] { put(index); });
  };
  for (;;) {
    if (p >= margin && margin != end) {
      p = input_.move_window(p);
      end = input_.end();
      margin = input_.window_margin();
    }
    const std::uint8_t* const opcode = p;
    if (p == end) with(opcode, [&] { fail("the pickle ends without STOP, expected it as the last opcode"); });
    if (left-- == 0) with(opcode, [&] { fail("more opcodes than the limit, expected at most {}", limits_.items); });
    if (top == limit) {
      with(opcode, [&] { grow_stack(); });
      base = values_.data();
      limit = base + values_.capacity();
    }
    const auto remains = static_cast<std::size_t>(end - p);  // the opcode included
    switch (*p++) {
      case op::MEMOIZE:
        put_next(opcode, memo_.next());
        break;
      case op::BINGET:
        if (remains < 2) input_.fail_truncated(opcode, p, 1);
        fetch(opcode, *p++);
        break;
      case op::LONG_BINGET:
        if (remains < 5) input_.fail_truncated(opcode, p, 4);
        p += 4;
        fetch(opcode, load_little_endian<std::uint32_t>(p - 4));
        break;
      case op::BINPUT:
        if (remains < 2) input_.fail_truncated(opcode, p, 1);
        put_next(opcode, *p++);
        break;
      case op::LONG_BINPUT:
        if (remains < 5) input_.fail_truncated(opcode, p, 4);
        put_next(opcode, load_little_endian<std::uint32_t>(p));
        p += 4;
        break;
      case op::BININT1:
        if (remains < 2) input_.fail_truncated(opcode, p, 1);
        push_value(nodes_.integer(*p++), 0);
        break;
      case op::BININT2:
        if (remains < 3) input_.fail_truncated(opcode, p, 2);
        push_value(nodes_.integer(load_little_endian<std::uint16_t>(p)), 0);
        p += 2;
        break;
      case op::BININT:
        if (remains < 5) input_.fail_truncated(opcode, p, 4);
        push_value(nodes_.integer(static_cast<std::int32_t>(load_little_endian<std::uint32_t>(p))), 0);
        p += 4;
        break;
      case op::SHORT_BINUNICODE: {
        if (remains < 2 || remains - 2 < *p) input_.fail_truncated(opcode, p, remains < 2 ? 1 : 1u + *p);
        const ByteView text(p + 1, *p);
        if (!is_python_utf8(as_text(text))) with(opcode, [&] { push_string(text); });
        push_value(nodes_.text(Kind::string, text), 0);
        p += 1 + text.size();
        break;
      }
      case op::NONE:
        push_value(NodeRef(), 0);
        break;
      case op::NEWTRUE:
        push_value(Nodes::boolean(true), 0);
        break;
      case op::NEWFALSE:
        push_value(Nodes::boolean(false), 0);
        break;
      case op::EMPTY_TUPLE:
        push_value(nodes_.tuple(nullptr, 0), 1);
        break;
      case op::EMPTY_DICT:
        opcode_ = opcode;
        push_value(nodes_.dict(), 1);
        break;
      case op::EMPTY_LIST:
        opcode_ = opcode;
        push_value(nodes_.list(Kind::list), 1);
        break;
      case op::TUPLE1:
        tuple(opcode, 1);
        break;
      case op::TUPLE2:
        tuple(opcode, 2);
        break;
      case op::TUPLE3:
        tuple(opcode, 3);
        break;
      case op::MARK:
        if (marks_.size() >= limits_.depth) with(opcode, [&] { fail_depth(); });
        marks_.push_back(static_cast<std::size_t>(top - base));
        floor_ = top;
        break;
      case op::TUPLE: {
        if (marks_.empty()) with(opcode, [&] { pop_mark(); });
        const auto count = static_cast<std::size_t>(top - floor_);
        tuple(opcode, count);
        marks_.pop_back();
        set_floor();
        break;
      }
      case op::REDUCE:
        with(opcode, [&] { call(Object::Made::reduce); });
        break;
      case op::NEWOBJ:
        with(opcode, [&] { call(Object::Made::new_object); });
        break;
      case op::BUILD:
        with(opcode, [&] { build(); });
        break;
      case op::SETITEMS:
        with(opcode, [&] { set_items(pop_mark()); });
        break;
      case op::STOP:
        require(opcode, 1);
        length_bytes = input_.offset_of(p);
        return top[-1];
      default:
        with(opcode, [&] { run_rare(*opcode); });
        break;
    }
  }
}

namespace {

void read_into(ReadResult& result, Input input, const ReadLimits& limits, RecordTaker* taker) {
  constexpr std::uint64_t kLeastMemoryBytes = std::uint64_t{64} << 20;
  constexpr std::uint64_t kMemoryPerByte = 48;
  Nodes& nodes = Nodes::of(result.tree);
  const std::uint64_t size_bytes = input.left(input.begin());
  nodes.set_limit(limits.memory_bytes != 0 ? limits.memory_bytes : kLeastMemoryBytes + kMemoryPerByte * size_bytes);
  result.tree.set_root(Interpreter(nodes, std::move(input), limits, taker).read(result.length_bytes));
  nodes.set_limit(UINT64_MAX);
}

}  // namespace

ReadResult read(ByteView bytes, const std::string& name, const ReadLimits& limits, std::uint64_t base_offset_bytes) {
  ReadResult result;
  read_into(result, Input(bytes, name, base_offset_bytes), limits, nullptr);
  return result;
}

ReadResult read(std::shared_ptr<const Bytes> bytes, const std::string& name, const ReadLimits& limits,
                std::uint64_t base_offset_bytes) {
  ReadResult result = read(ByteView(*bytes), name, limits, base_offset_bytes);
  result.tree.keep(std::move(bytes));
  return result;
}

ReadResult read_taking(const ByteSource& source, RecordTaker& taker) {
  ReadResult result;
  Nodes::of(result.tree).copy_texts();
  read_into(result, Input(source), {}, &taker);
  return result;
}

}  // namespace tessera::pickle
