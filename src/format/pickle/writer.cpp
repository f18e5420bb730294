#include "tessera/format/pickle_writer.h"

#include <algorithm>
#include <bit>

#include "format/pickle/integer.h"
#include "format/pickle/names.h"
#include "format/pickle/opcodes.h"
#include "format/pickle/writer_memo.h"
#include "tessera/base/error.h"
#include "tessera/format/internal/pickle_text.h"

namespace tessera::pickle {

namespace {

constexpr std::ptrdiff_t kMostDots = 100;  // of the name of a global: each is a call around the others
constexpr std::string_view kWriting = "write pickle";

}  // namespace

Writer::Writer(Bytes& out, int protocol) : out_(out), protocol_(protocol), memo_(std::make_unique<Memo>()) {
  if (protocol != 2 && protocol != 4)
    fail(ErrorCode::invalid_argument, "write pickle: protocol {}, expected 2 or 4", protocol);
  number(op::PROTO, static_cast<std::uint8_t>(protocol));
}

Writer::~Writer() = default;

template <typename T>
void Writer::number(std::uint8_t opcode, T value) {
  const std::size_t at = out_.size();
  out_.resize(at + 1 + sizeof(T));
  out_[at] = opcode;
  for (std::size_t i = 0; i < sizeof(T); ++i) out_[at + 1 + i] = static_cast<std::uint8_t>(value >> (8 * i));
}

// Uses the shortest of three length fields that fits the payload; 0 means that the protocol has no such opcode.
void Writer::sized(std::uint8_t opcode8, std::uint8_t opcode32, std::uint8_t opcode64, ByteView payload) {
  if (opcode8 != 0 && payload.size() <= UINT8_MAX) {
    number(opcode8, static_cast<std::uint8_t>(payload.size()));
  } else if (payload.size() <= UINT32_MAX) {
    number(opcode32, static_cast<std::uint32_t>(payload.size()));
  } else if (opcode64 != 0) {
    number(opcode64, std::uint64_t{payload.size()});
  } else {
    fail(ErrorCode::unsupported, "write pickle: text of {} bytes, expected at most {} in protocol 2", payload.size(),
         UINT32_MAX);
  }
  append(out_, payload);
}

void Writer::none() { out_.push_back(op::NONE); }
void Writer::boolean(bool value) { out_.push_back(value ? op::NEWTRUE : op::NEWFALSE); }

void Writer::integer(std::int64_t value) {
  if (value >= 0 && value <= UINT8_MAX) {
    number(op::BININT1, static_cast<std::uint8_t>(value));
  } else if (value >= 0 && value <= UINT16_MAX) {
    number(op::BININT2, static_cast<std::uint16_t>(value));
  } else if (value >= INT32_MIN && value <= INT32_MAX) {
    number(op::BININT, static_cast<std::uint32_t>(value));
  } else {
    Bytes bytes;
    append_little_endian(bytes, static_cast<std::uint64_t>(value));
    sized(op::LONG1, op::LONG4, 0, shortest_integer(bytes));
  }
}

void Writer::big_integer(ByteView two_complement) {
  const ByteView shortest = shortest_integer(two_complement);
  if (shortest.size() <= 8) return integer(integer_from_bytes(shortest));
  if (shortest.size() > INT32_MAX)
    fail(ErrorCode::unsupported, "write pickle: an int of {} bytes, expected at most {}", shortest.size(), INT32_MAX);
  sized(op::LONG1, op::LONG4, 0, shortest);
}

void Writer::floating(double value) {
  const auto bits = std::bit_cast<std::uint64_t>(value);
  out_.push_back(op::BINFLOAT);
  for (int shift = 56; shift >= 0; shift -= 8) out_.push_back(static_cast<std::uint8_t>(bits >> shift));
}

void Writer::string(std::string_view text) {
  if (protocol_ == 2) {
    sized(0, op::BINUNICODE, 0, as_bytes(text));
  } else {
    sized(op::SHORT_BINUNICODE, op::BINUNICODE, op::BINUNICODE8, as_bytes(text));
  }
}

void Writer::bytes(ByteView value) {
  if (protocol_ != 2) return sized(op::SHORT_BINBYTES, op::BINBYTES, op::BINBYTES8, value);
  // Also where Python writes bytes(), because weights_only loads this.
  interned_global("_codecs", "encode");
  string(utf8_from_latin1(as_text(value)));
  interned_string("latin1");
  tuple(2);
  reduce();
}

void Writer::byte_array(ByteView value) {
  interned_global("builtins", "bytearray");
  if (!value.empty()) bytes(value);
  tuple(value.empty() ? 0 : 1);
  reduce();
}

void Writer::global(std::string_view module, std::string_view name) {
  if (protocol_ != 2) {
    string(module);
    string(name);
    out_.push_back(op::STACK_GLOBAL);
    return;
  }
  if (const std::size_t dot = name.rfind('.'); dot != std::string_view::npos) {
    if (const auto dots = std::count(name.begin(), name.end(), '.'); dots > kMostDots) {
      fail(ErrorCode::unsupported, "{}: the name of a global of {} has {} dots, expected at most {} in protocol 2",
           kWriting, printable(module), dots, kMostDots);
    }
    interned_global("builtins", "getattr");
    interned_global(module, name.substr(0, dot));
    interned_string(name.substr(dot + 1));
    tuple(2);
    reduce();
    return;
  }
  const auto old = python2_name({module, name});
  if (!old || module.find('\n') != std::string_view::npos || name.find('\n') != std::string_view::npos)
    fail(ErrorCode::unsupported,
         "write pickle: protocol 2 cannot represent the global {} of {}, expected names without line breaks that mean "
         "the same in Python 3; use protocol 4",
         printable(name), printable(module));
  out_.push_back(op::GLOBAL);
  append(out_, old->module);
  out_.push_back('\n');
  append(out_, old->name);
  out_.push_back('\n');
}

void Writer::mark() { out_.push_back(op::MARK); }

void Writer::tuple(std::size_t count) {
  constexpr std::uint8_t kOpcodes[] = {op::EMPTY_TUPLE, op::TUPLE1, op::TUPLE2, op::TUPLE3};
  if (count > 3)
    fail(ErrorCode::invalid_argument, "write pickle: a tuple of {} without a mark, expected at most 3 items", count);
  out_.push_back(kOpcodes[count]);
}

void Writer::tuple_from_mark() { out_.push_back(op::TUPLE); }
void Writer::empty_list() { out_.push_back(op::EMPTY_LIST); }
void Writer::appends() { out_.push_back(op::APPENDS); }
void Writer::empty_dict() { out_.push_back(op::EMPTY_DICT); }
void Writer::set_items() { out_.push_back(op::SETITEMS); }

void Writer::empty_set() {
  if (protocol_ < 4) fail(ErrorCode::invalid_argument, "write pickle: an empty set in protocol 2, expected protocol 4");
  out_.push_back(op::EMPTY_SET);
}

void Writer::reduce() { out_.push_back(op::REDUCE); }
void Writer::new_object() { out_.push_back(op::NEWOBJ); }
void Writer::build() { out_.push_back(op::BUILD); }
void Writer::persistent_id() { out_.push_back(op::BINPERSID); }
void Writer::stop() { out_.push_back(op::STOP); }

void Writer::extension(std::uint64_t code) {
  if (code <= UINT8_MAX) {
    number(op::EXT1, static_cast<std::uint8_t>(code));
  } else if (code <= UINT16_MAX) {
    number(op::EXT2, static_cast<std::uint16_t>(code));
  } else {
    number(op::EXT4, static_cast<std::uint32_t>(code));
  }
}

std::uint32_t Writer::memoize() {
  if (protocol_ >= 4) {
    out_.push_back(op::MEMOIZE);
  } else if (next_memo_ <= UINT8_MAX) {
    number(op::BINPUT, static_cast<std::uint8_t>(next_memo_));
  } else {
    number(op::LONG_BINPUT, next_memo_);
  }
  if (next_memo_ == UINT32_MAX) {
    fail(ErrorCode::unsupported, "write pickle: more memo entries than the limit, expected at most {}", UINT32_MAX);
  }
  return next_memo_++;
}

void Writer::get(std::uint32_t memo_index) {
  if (memo_index <= UINT8_MAX) {
    number(op::BINGET, static_cast<std::uint8_t>(memo_index));
  } else {
    number(op::LONG_BINGET, memo_index);
  }
}

void Writer::interned_string(std::string_view text) {
  TextMap<std::uint32_t>& strings = memo_->strings;
  if (const auto known = strings.find(text); known != strings.end()) return get(known->second);
  string(text);
  strings.emplace(text, memoize());
}

void Writer::interned_global(std::string_view module, std::string_view name) { push_global(module, name); }

// Returns the memo index.
std::uint32_t Writer::push_global(std::string_view module, std::string_view name) {
  memo_->texts.charge(GlobalName{module, name}, module.size() + name.size(), kWriting);
  // The module's length is in the key, which makes it unambiguous.
  std::string key = std::to_string(module.size());
  key.append(1, ' ').append(module).append(name);
  TextMap<std::uint32_t>& globals = memo_->globals;
  if (const auto known = globals.find(key); known != globals.end()) {
    get(known->second);
    return known->second;
  }
  if (protocol_ >= 4) {
    interned_string(module);
    interned_string(name);
    out_.push_back(op::STACK_GLOBAL);
  } else {
    global(module, name);
  }
  const std::uint32_t index = memoize();
  globals.emplace(std::move(key), index);
  return index;
}

// Charges for text that is written without regard to the memo.
void Writer::charge(ByteView text) { memo_->texts.charge(as_text(text), text.size(), kWriting); }

}  // namespace tessera::pickle
