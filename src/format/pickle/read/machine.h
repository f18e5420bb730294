#pragma once
// The state of a pickle being read: the position in its bytes, the stack with its marks, the memo. Errors are reported
// here, with the opcode and its offset.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <string>
#include <unordered_map>
#include <vector>

#include "format/pickle/nodes.h"
#include "format/pickle/opcodes.h"
#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/format/pickle_reader.h"

namespace tessera::pickle {

// A flat array of plain data that grows in place if the system can do so.
template <typename T>
class FlatArray {
 public:
  FlatArray() = default;
  FlatArray(const FlatArray&) = delete;
  FlatArray& operator=(const FlatArray&) = delete;
  ~FlatArray() { std::free(data_); }
  T* data() const { return data_; }
  std::size_t capacity() const { return capacity_; }
  void grow(std::size_t capacity) {
    void* data = std::realloc(static_cast<void*>(data_), capacity * sizeof(T));
    if (data == nullptr) throw std::bad_alloc();
    data_ = static_cast<T*>(data);
    capacity_ = capacity;
  }

 private:
  T* data_ = nullptr;
  std::size_t capacity_ = 0;
};

// The bytes of a pickle: all of them, or a window that moves over a source.
class Input {
 public:
  Input(ByteView bytes, const std::string& name, std::uint64_t base_offset_bytes)
      : begin_(bytes.data()), end_(begin_ + bytes.size()), name_(name), base_offset_bytes_(base_offset_bytes) {}
  // `source` must outlive the input.
  explicit Input(const ByteSource& source);

  const std::uint8_t* begin() const { return begin_; }
  const std::uint8_t* end() const { return end_; }
  // A cursor at or past this position must call `move_window`.
  const std::uint8_t* window_margin() const { return behind_window_ == 0 ? end_ : end_ - kMarginBytes; }
  // Reads more bytes, if there are any, so that the window begins at `at`. Returns the new position of `at`. Pointers
  // into the window become invalid.
  const std::uint8_t* move_window(const std::uint8_t* at);

  std::uint64_t offset_of(const std::uint8_t* at) const {
    return before_window_ + static_cast<std::uint64_t>(at - begin_);
  }
  // The number of bytes from `at` to the end of the pickle.
  std::uint64_t left(const std::uint8_t* at) const { return static_cast<std::uint64_t>(end_ - at) + behind_window_; }

  // Throws an error about the opcode at `opcode`.
  template <typename... Args>
  [[noreturn]] void fail(ErrorCode code, const std::uint8_t* opcode, fmt::format_string<Args...> format,
                         Args&&... args) const {
    fail_with(code, opcode, fmt::format(format, std::forward<Args>(args)...));
  }
  [[noreturn]] void fail_with(ErrorCode code, const std::uint8_t* opcode, const std::string& problem) const;
  [[noreturn]] void fail_truncated(const std::uint8_t* opcode, const std::uint8_t* at, std::uint64_t wanted) const;

  // Returns the next `size` bytes and moves `at` past them.
  ByteView take(const std::uint8_t* opcode, const std::uint8_t*& at, std::uint64_t size) const {
    if (size > static_cast<std::uint64_t>(end_ - at)) fail_truncated(opcode, at, size);
    const ByteView result(at, size);
    at += size;
    return result;
  }
  template <typename T>
  T number(const std::uint8_t* opcode, const std::uint8_t*& at) const {
    return load_little_endian<T>(take(opcode, at, sizeof(T)).data());
  }
  // Returns a text line without its line break and moves `at` past it.
  std::string_view line(const std::uint8_t* opcode, const std::uint8_t*& at) const;

 private:
  // An opcode with its argument, or a record, that is longer than the margin may not fit into the window.
  static constexpr std::size_t kWindowBytes = std::size_t{1} << 20;
  static constexpr std::size_t kMarginBytes = std::size_t{64} << 10;

  Bytes window_;
  const ByteSource* source_ = nullptr;  // null if all bytes are in memory
  const std::uint8_t* begin_;
  const std::uint8_t* end_;
  const std::string& name_;
  std::uint64_t base_offset_bytes_;
  std::uint64_t before_window_ = 0, behind_window_ = 0;
};

// A depth is how far a value was nested when it reached its position.
using Depth = std::uint16_t;

// Python numbers memo entries 0, 1, 2, ..., so entries are sorted by index, mostly without gaps.
class Memo {
 public:
  static constexpr std::uint64_t kIndexMask = 0xffff'ffff'ffff;
  struct Entry {
    NodeRef value;
    std::uint64_t index : 48;
    std::uint64_t depth : 16;
  };
  // Returns null if nothing was put at the index, or if it was skipped.
  const Entry* get(std::uint64_t index) const {
    const Entry* const entries = entries_.data();
    if (index < count_ && entries[index].index == index) return &entries[index];
    const Recent& recent = recent_[index % recent_.size()];
    return recent.index == index && index != kNoIndex ? &entries[recent.position] : find(index);
  }
  // The index that MEMOIZE uses: the number of indices put so far.
  std::uint64_t next() const { return next_; }
  void append(NodeRef value, Depth depth) {
    if (!others_.empty()) return put(next_, value, depth);
    if (count_ == entries_.capacity()) entries_.grow(std::max<std::size_t>(256, 2 * count_));
    entries_.data()[count_++] = {value, next_++ & kIndexMask, depth};
  }
  void put(std::uint64_t index, NodeRef value, Depth depth);

  // Records (records.h) do not put their contents. Fetching these finds nothing. A PUT with an explicit index could not
  // be distinguished from a second PUT of it, so it is refused.
  void skip(std::uint64_t count) {
    next_ += count;
    has_skipped_ = true;
  }
  bool can_put(std::uint64_t index) const { return !has_skipped_ || index == next_; }

 private:
  Entry* find(std::uint64_t index) const;

  static constexpr std::uint64_t kNoIndex = UINT64_MAX;  // above kIndexMask, but a pickle can name it
  struct Recent {
    std::uint64_t index = kNoIndex;
    std::size_t position = 0;
  };
  FlatArray<Entry> entries_;
  std::size_t count_ = 0;
  std::unordered_map<std::uint64_t, Entry, NumberHash> others_;  // put out of order
  std::uint64_t next_ = 0;
  bool has_skipped_ = false;
  mutable std::array<Recent, 256> recent_;
};

}  // namespace tessera::pickle
