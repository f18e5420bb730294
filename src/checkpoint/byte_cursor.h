#pragma once
// Serialization of numbers and text for messages between ranks.

#include <cstring>
#include <string>
#include <string_view>

#include "tessera/base/bytes.h"
#include "tessera/base/error.h"

namespace tessera::checkpoint {

inline void append_text(Bytes& out, std::string_view text) {
  append_little_endian<std::uint64_t>(out, text.size());
  append(out, text);
}

// Reads numbers and text in the order in which they were written. Throws Error(corrupt) if the bytes end too early.
class ByteCursor {
 public:
  ByteCursor(ByteView bytes, std::string_view what) : bytes_(bytes), what_(what) {}

  template <typename T>
  T number() {
    return load_little_endian<T>(take(sizeof(T)).data());
  }
  std::string_view text() { return as_text(take(number<std::uint64_t>())); }
  ByteView take(std::uint64_t count) {
    if (count > bytes_.size() - at_) {
      fail(ErrorCode::corrupt, "{} at byte {}: {} bytes left, expected {}", what_, at_, bytes_.size() - at_, count);
    }
    const ByteView part = bytes_.subspan(at_, count);
    at_ += count;
    return part;
  }
  ByteView rest() { return take(bytes_.size() - at_); }
  void expect_end() const {
    if (at_ != bytes_.size()) fail(ErrorCode::corrupt, "{}: {} bytes, expected {}", what_, bytes_.size(), at_);
  }

 private:
  ByteView bytes_;
  std::string_view what_;
  std::uint64_t at_ = 0;
};

}  // namespace tessera::checkpoint
