#include "format/zip/window.h"

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::zip {
namespace {

constexpr std::uint64_t kReadWholeBytes = 64u << 10;
constexpr std::uint64_t kPieceBytes = 4u << 10;  // holds the headers of several small entries

}  // namespace

Window::Window(const ByteSource& source, std::uint64_t offset_bytes, std::uint64_t length_bytes)
    : source_(source), offset_(offset_bytes), length_(length_bytes) {
  const std::uint64_t size = source.size_bytes();
  if (offset_bytes > size || length_bytes > size - offset_bytes) {
    fail(ErrorCode::corrupt,
         "{}: an archive of {} bytes at byte {} ends past the file, expected it within its {} bytes", source.name(),
         length_bytes, offset_bytes, size);
  }
  if (length_ <= kReadWholeBytes) view_tail(length_);
}

ByteView Window::view_tail(std::uint64_t size) {
  size = std::min(size, length_);
  if (size > tail_.bytes.size()) {
    tail_.begin = length_ - size;
    tail_.bytes.resize(size);
    source_.read_at(offset_ + tail_.begin, tail_.bytes);
  }
  return ByteView(tail_.bytes).last(size);
}

ByteView Window::view(std::uint64_t at, std::uint64_t size, std::string_view what) {
  if (at > length_ || size > length_ - at) {
    fail(ErrorCode::corrupt, "{}: {} of {} bytes at byte {}, expected it to end by byte {}, where the archive ends",
         name(), what, size, in_source(at), in_source(length_));
  }
  for (const Piece* piece : {&tail_, &piece_}) {
    if (at >= piece->begin && at + size <= piece->begin + piece->bytes.size()) {
      return ByteView(piece->bytes).subspan(at - piece->begin, size);
    }
  }
  piece_.begin = at;
  piece_.bytes.resize(std::min(std::max(size, kPieceBytes), length_ - at));
  source_.read_at(offset_ + at, piece_.bytes);
  return ByteView(piece_.bytes).first(size);
}

void Window::read(std::uint64_t at, MutableByteView out) {
  if (at >= tail_.begin && at + out.size() <= tail_.begin + tail_.bytes.size()) {
    std::copy_n(tail_.bytes.data() + (at - tail_.begin), out.size(), out.data());
  } else {
    source_.read_at(in_source(at), out);
  }
}

}  // namespace tessera::zip
