#pragma once
// Records: objects of which a pickle holds millions. Python writes each with the same opcodes, so they can be read
// right from the bytes, without making a tree of them.

#include <cstdint>
#include <optional>
#include <vector>

#include "format/pickle/opcodes.h"
#include "format/pickle/read/machine.h"
#include "tessera/format/pickle_reader.h"

namespace tessera::pickle {

// The strings that stand in records. Most are there many times, one behind the other or in turn.
class RecordTexts {
 public:
  explicit RecordTexts(Nodes& nodes) : nodes_(nodes) {}
  // The string of `utf8`, mostly the one that an equal text got before; None if it isn't UTF-8.
  NodeRef string(ByteView utf8);

 private:
  Nodes& nodes_;
  std::vector<NodeRef> recent_;
};

// The opcodes from a place in a pickle on, as one that expects certain ones reads them. Each function moves on and is
// true if what it names comes next; after the first false nothing more may be asked. Nothing changes until `accept`.
class RecordCursor {
 public:
  RecordCursor(const std::uint8_t* at, const std::uint8_t* end, const Memo& memo, RecordTexts& texts)
      : at_(at), end_(end), memo_(memo), texts_(texts) {}

  bool opcode(op::Opcode expected) {
    if (at_ == end_ || *at_ != expected) return false;
    ++at_;
    return true;
  }
  // MEMOIZE, which may be left out.
  void memoize() { puts_ += opcode(op::MEMOIZE) ? 1 : 0; }
  // What BINGET or LONG_BINGET fetches.
  bool fetch(NodeRef& value) {
    std::uint64_t index = 0;
    if (left() >= 2 && *at_ == op::BINGET) {
      index = at_[1];
      at_ += 2;
    } else if (left() >= 5 && *at_ == op::LONG_BINGET) {
      index = load_little_endian<std::uint32_t>(at_ + 1);
      at_ += 5;
    } else {
      return false;
    }
    const Memo::Entry* const entry = memo_.get(index);
    if (entry == nullptr) return false;
    value = entry->value;
    return true;
  }
  // An int of 64 bits.
  bool integer(std::int64_t& value);
  // A str that is fetched, or one of at most 255 bytes that stands here and may be put, once in a record.
  bool string(NodeRef& value);

  // Puts the string that was put in the record, the one thing in it that is likely to be fetched. Returns what follows.
  const std::uint8_t* accept(Memo& memo) const;

 private:
  std::size_t left() const { return static_cast<std::size_t>(end_ - at_); }
  const std::uint8_t* at_;
  const std::uint8_t* end_;
  const Memo& memo_;
  RecordTexts& texts_;
  std::uint64_t puts_ = 0;
  std::optional<NodeRef> text_;
  std::uint64_t puts_before_text_ = 0;
};

class RecordTaker {
 public:
  virtual ~RecordTaker() = default;
  // `global` has just been fetched from the memo. If a record of this class follows that the taker understands, it
  // moves `cursor` behind it and returns a number below 2^48 that stands for it in the tree as `Kind::taken`. If not,
  // the opcodes are done one by one, from where the cursor was.
  virtual std::optional<std::uint64_t> take(NodeRef global, RecordCursor& cursor) = 0;
};

// As `read` of pickle_reader.h, with records taken out of the tree. Has about a megabyte of the pickle in memory at a
// time, and the tree doesn't need it; so who wants to know where something is wrong, or has a pickle with arguments
// that are longer (Error(corrupt)), reads it with `read`.
ReadResult read_taking(const ByteSource& source, RecordTaker& taker);

}  // namespace tessera::pickle
