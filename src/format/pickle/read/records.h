#pragma once
// Records: objects of which a pickle holds millions. Python writes each with the same opcodes, so they are decoded from
// the bytes without building a tree.

#include <cstdint>
#include <optional>
#include <vector>

#include "format/pickle/opcodes.h"
#include "format/pickle/read/machine.h"
#include "tessera/format/pickle_reader.h"

namespace tessera::pickle {

// The strings in records. Most occur many times, in a row or alternating.
class RecordTexts {
 public:
  explicit RecordTexts(Nodes& nodes) : nodes_(nodes) {}
  // Returns the string of `utf8`, usually the node of an earlier equal text. Returns None if it is not UTF-8.
  NodeRef string(ByteView utf8);

 private:
  Nodes& nodes_;
  std::vector<NodeRef> recent_;
};

// Matches a sequence of expected opcodes. Each function advances and returns true if the named opcode comes next. After
// the first false, no other function may be called. Nothing changes until `accept`.
class RecordCursor {
 public:
  RecordCursor(const std::uint8_t* at, const std::uint8_t* end, const Memo& memo, RecordTexts& texts)
      : at_(at), end_(end), memo_(memo), texts_(texts) {}

  bool opcode(op::Opcode expected) {
    if (at_ == end_ || *at_ != expected) return false;
    ++at_;
    return true;
  }
  // MEMOIZE, which is optional.
  void memoize() { puts_ += opcode(op::MEMOIZE) ? 1 : 0; }
  // The value that BINGET or LONG_BINGET fetches.
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
  // A str that is fetched, or one of at most 255 bytes that is inline and may be put; at most one per record.
  bool string(NodeRef& value);

  // Puts the string that was put in the record, its only content that is likely to be fetched. Returns what follows.
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
  // `global` has just been fetched from the memo. If a record of this class follows that the taker understands, moves
  // `cursor` past it and returns a number below 2^48 that represents it in the tree as `Kind::taken`. Otherwise, the
  // opcodes are executed one by one from the original cursor.
  virtual std::optional<std::uint64_t> take(NodeRef global, RecordCursor& cursor) = 0;
};

// As `read` of pickle_reader.h, but keeps records out of the tree. Holds about one megabyte of the pickle in memory at
// a time; the tree does not refer to it. To get the exact error, or for a pickle with longer arguments
// (Error(corrupt)), use `read`.
ReadResult read_taking(const ByteSource& source, RecordTaker& taker);

}  // namespace tessera::pickle
