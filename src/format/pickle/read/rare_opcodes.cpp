// The opcodes that are too rare for the loop, including those of protocol 0.

#include <bit>
#include <charconv>

#include "format/pickle/integer.h"
#include "format/pickle/names.h"
#include "format/pickle/read/interpreter.h"
#include "tessera/format/internal/pickle_text.h"

namespace tessera::pickle {

void Interpreter::append(std::size_t count) {
  need(1 + count);
  const NodeRef target = top_[-1 - static_cast<std::ptrdiff_t>(count)];
  const NodeRef* items = top_ - count;
  const Depth depth = count == 0 ? 0 : depth_around(depths() - count, count);
  if (target.is(Kind::list)) {
    nodes_.append(target, items, count);
  } else if (target.is(Kind::object)) {
    nodes_.append_to_object(target, items, count);
  } else {
    fail("appends to {}, expected a list or object", kind_name(target.kind()));
  }
  top_ -= count;
  depths()[-1] = std::max(depths()[-1], depth);
}

void Interpreter::add_items(std::size_t count) {
  need(1 + count);
  const NodeRef target = top_[-1 - static_cast<std::ptrdiff_t>(count)];
  if (!target.is(Kind::set)) fail("adds items to {}, expected a set", kind_name(target.kind()));
  const Depth depth = count == 0 ? 0 : depth_around(depths() - count, count);
  nodes_.append(target, top_ - count, count);
  top_ -= count;
  depths()[-1] = std::max(depths()[-1], depth);
}

// Drops a value. A call for its effect on the object below is kept there: CPython's `save_reduce` writes one for a
// state setter.
void Interpreter::pop() {
  need(1);
  const NodeRef call = top_[-1];
  --top_;
  if (top_ == floor_ || !top_[-1].is(Kind::object) || !call.is(Kind::object)) return;
  const Object& made = call.object();
  if (made.made != Object::Made::reduce || !made.arguments.is(Kind::tuple)) return;
  const auto arguments = made.arguments.items();
  if (arguments.size() != 2 || !arguments[0].same(top_[-1])) return;
  const Depth depth = depth_around(depths(), 1);
  nodes_.add_setter_call(top_[-1], call);
  depths()[-1] = std::max(depths()[-1], depth);
}

void Interpreter::push_text(Kind kind, ByteView bytes) { push(nodes_.text(kind, bytes), 0); }

void Interpreter::push_string(ByteView utf8) {
  if (!is_python_utf8(as_text(utf8))) fail("text of {} bytes is not UTF-8, expected UTF-8", utf8.size());
  push_text(Kind::string, utf8);
}

// Python 2's str: a string if it is UTF-8, otherwise bytes.
void Interpreter::push_byte_string(ByteView bytes) {
  push_text(is_python_utf8(as_text(bytes)) ? Kind::string : Kind::bytes, bytes);
}

void Interpreter::push_integer(ByteView two_complement) {
  const ByteView shortest = shortest_integer(two_complement);
  push(shortest.size() <= 8 ? nodes_.integer(integer_from_bytes(shortest)) : nodes_.text(Kind::big_integer, shortest),
       0);
}

void Interpreter::push_global(std::string_view module, std::string_view name) {
  GlobalName global{module, name};
  if (protocol_ < 3) global = python3_name(global);
  push(nodes_.global(global.module, global.name), 0);
}

void Interpreter::push_instance(NodeRef callable, std::size_t count, std::size_t replaced) {
  const NodeRef arguments = nodes_.tuple(top_ - count, count);
  replace(replaced, nodes_.object(Object::Made::instance, callable, arguments));
}

void Interpreter::push_extension(std::uint32_t code) {
  if (code == 0 || code > 0x7fff'ffff)
    fail("extension code {}, expected 1 to 2^31 - 1", static_cast<std::int32_t>(code));
  push(nodes_.object(Object::Made::extension, nodes_.integer(code), NodeRef()), 1);
}

std::uint64_t Interpreter::line_number() {
  const std::string_view text = line();
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size())
    fail("\"{}\" is not a memo index, expected an int from 0 to 2^64 - 1", printable(text));
  return value;
}

std::string_view Interpreter::utf8_line() {
  const std::string_view text = line();
  if (!is_python_utf8(text)) fail("a name of {} bytes is not UTF-8, expected UTF-8", text.size());
  return text;
}

void Interpreter::run_rare(std::uint8_t opcode) {
  switch (opcode) {
    case op::PROTO:
      protocol_ = number<std::uint8_t>();
      if (protocol_ > 5) input_.fail(ErrorCode::unsupported, opcode_, "protocol {}, expected at most 5", protocol_);
      break;
    case op::FRAME: {
      const auto size = number<std::uint64_t>();
      const std::uint64_t left = input_.left(cursor_);
      if (size > left) fail("a frame of {} bytes, expected at most the {} bytes left", size, left);
      break;
    }
    case op::POP:
      if (!marks_.empty() && top_ == floor_) {
        pop_mark();
      } else {
        pop();
      }
      break;
    case op::POP_MARK:
      top_ -= pop_mark();
      break;
    case op::DUP:
      need(1);
      push(top_[-1], depths()[-1]);
      break;
    case op::LONG1:
      push_integer(take(number<std::uint8_t>()));
      break;
    case op::LONG4: {
      const auto size = number<std::uint32_t>();
      if (size > 0x7fff'ffff) fail("a negative length of {}, expected 0 or more", static_cast<std::int32_t>(size));
      push_integer(take(size));
      break;
    }
    case op::BINFLOAT: {
      std::uint64_t bits = 0;
      for (const std::uint8_t byte : take(8)) bits = (bits << 8) | byte;
      push(nodes_.floating(std::bit_cast<double>(bits)), 0);
      break;
    }
    case op::BINUNICODE:
      push_string(take(number<std::uint32_t>()));
      break;
    case op::BINUNICODE8:
      push_string(take(number<std::uint64_t>()));
      break;
    case op::SHORT_BINSTRING:
      push_byte_string(take(number<std::uint8_t>()));
      break;
    case op::BINSTRING: {
      const auto size = number<std::uint32_t>();
      if (size > 0x7fff'ffff) fail("a negative length of {}, expected 0 or more", static_cast<std::int32_t>(size));
      push_byte_string(take(size));
      break;
    }
    case op::SHORT_BINBYTES:
      push_text(Kind::bytes, take(number<std::uint8_t>()));
      break;
    case op::BINBYTES:
      push_text(Kind::bytes, take(number<std::uint32_t>()));
      break;
    case op::BINBYTES8:
      push_text(Kind::bytes, take(number<std::uint64_t>()));
      break;
    case op::BYTEARRAY8:
      push(nodes_.text_node(Kind::byte_array, take(number<std::uint64_t>())), 0);
      break;
    case op::LIST: {
      const std::size_t count = pop_mark();
      const NodeRef list = nodes_.list(Kind::list);
      nodes_.append(list, top_ - count, count);
      replace(count, list);
      break;
    }
    case op::APPEND:
      append(1);
      break;
    case op::APPENDS:
      append(pop_mark());
      break;
    case op::DICT: {
      const std::size_t count = pop_mark();
      if (count % 2 != 0) fail("{} keys and values, expected an even number", count);
      const NodeRef dict = nodes_.dict();
      nodes_.set_items(dict, top_ - count, count / 2);
      replace(count, dict);
      break;
    }
    case op::SETITEM:
      set_items(2);
      break;
    case op::EMPTY_SET:
      push(nodes_.list(Kind::set), 1);
      break;
    case op::ADDITEMS:
      add_items(pop_mark());
      break;
    case op::FROZENSET: {
      const std::size_t count = pop_mark();
      const NodeRef set = nodes_.list(Kind::frozen_set);
      nodes_.append(set, top_ - count, count);
      replace(count, set);
      break;
    }
    case op::STACK_GLOBAL: {
      need(2);
      const NodeRef module = top_[-2];
      const NodeRef name = top_[-1];
      if (!module.is(Kind::string) || !name.is(Kind::string))
        fail("found {} and {}, expected module and name as strings", kind_name(module.kind()), kind_name(name.kind()));
      top_ -= 2;
      push_global(module.string(), name.string());
      break;
    }
    case op::NEWOBJ_EX:
      need(3);
      replace(3, nodes_.object_with_keywords(top_[-3], top_[-2], top_[-1]));
      break;
    case op::OBJ: {
      const std::size_t count = pop_mark();
      if (count == 0) fail("nothing above the mark, expected a class");
      push_instance(*(top_ - count), count - 1, count);
      break;
    }
    case op::EXT1:
      push_extension(number<std::uint8_t>());
      break;
    case op::EXT2:
      push_extension(number<std::uint16_t>());
      break;
    case op::EXT4:
      push_extension(number<std::uint32_t>());
      break;
    case op::BINPERSID:
      need(1);
      replace(1, nodes_.persistent_id(top_[-1]));
      break;
    case op::NEXT_BUFFER:
    case op::READONLY_BUFFER:
      input_.fail(ErrorCode::unsupported, opcode_,
                  "the bytes are in an out-of-band buffer, expected them in the pickle");
    default:
      run_text(opcode);
  }
}

// Protocol 0, and its opcodes that remain in protocol 2.
void Interpreter::run_text(std::uint8_t opcode) {
  switch (opcode) {
    case op::GLOBAL: {
      const std::string_view module = utf8_line();
      push_global(module, utf8_line());
      break;
    }
    case op::INST: {
      const std::string_view module = utf8_line();
      const std::string_view name = utf8_line();
      const std::size_t count = pop_mark();
      const GlobalName global = protocol_ < 3 ? python3_name({module, name}) : GlobalName{module, name};
      push_instance(nodes_.global(global.module, global.name), count, count);
      break;
    }
    case op::GET:
      get(line_number());
      break;
    case op::PUT:
      put(line_number());
      break;
    case op::INT:
    case op::LONG: {
      std::string_view text = line();
      if (opcode == op::INT && (text == "00" || text == "01")) {
        push(Nodes::boolean(text == "01"), 0);
        break;
      }
      if (opcode == op::LONG && text.ends_with('L')) text.remove_suffix(1);
      const auto value = parse_integer(text);
      if (!value) fail("\"{}\" is not an int, expected one of at most {} digits", printable(text), kMostDigits);
      push_integer(nodes_.copy(*value));
      break;
    }
    case op::FLOAT: {
      const std::string_view text = line();
      const auto value = parse_float(text);
      if (!value) fail("\"{}\" is not a float, expected a number, inf or nan", printable(text));
      push(nodes_.floating(*value), 0);
      break;
    }
    case op::STRING: {
      const std::string_view text = line();
      const auto bytes = parse_quoted_bytes(text);
      if (!bytes) fail("\"{}\" is not a quoted string, expected a str literal of Python", printable(text));
      push_byte_string(nodes_.copy(as_bytes(*bytes)));
      break;
    }
    case op::UNICODE: {
      const std::string_view escaped = line();
      const auto text = parse_raw_unicode(escaped);
      if (!text) fail("\"{}\" has a malformed escape, expected \\uXXXX or \\UXXXXXXXX", printable(escaped));
      push_string(nodes_.copy(as_bytes(*text)));
      break;
    }
    case op::PERSID:
      push_string(as_bytes(line()));
      replace(1, nodes_.persistent_id(top_[-1]));
      break;
    default:
      fail("unknown opcode, expected one of protocols 0 to 5");
  }
}

}  // namespace tessera::pickle
