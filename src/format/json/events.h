#pragma once
/// \file
/// Reads untrusted JSON as events with a path, in one pass and without a tree: strict JSON in UTF-8, no duplicate keys,
/// limited depth. Every error is `Error(corrupt)` with the file and the byte offset at which it was detected.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/text_hash.h"

namespace tessera::json {

struct Scalar {
  enum class Kind : std::uint8_t { null, boolean, unsigned_integer, negative_integer, floating, string };
  Kind kind = Kind::null;
  std::uint64_t number = 0;  ///< of an unsigned integer
  double real = 0;           ///< of a floating
  std::string text;          ///< of a string, UTF-8
  bool is(Kind k) const { return kind == k; }
};

/// Returns "a string", "a number with a fraction", ... for messages.
std::string_view scalar_kind_name(Scalar::Kind kind);
/// Returns "an array" or "an object", for messages.
inline std::string_view container_name(bool is_array) { return is_array ? "an array" : "an object"; }

/// One container around the current value.
struct Level {
  bool is_array = false;
  std::string key;          ///< of the current value, in an object
  std::uint64_t index = 0;  ///< of the current value, in an array
  TextSet keys;
};

/// The position of the reader.
class Cursor {
 public:
  /// The containers around the current value, outermost first; empty at the top level.
  std::span<const Level> path() const { return path_; }
  /// The byte offset in the file after the last byte read (the end of a number is detected one byte later).
  std::uint64_t offset_bytes() const { return base_offset_ + static_cast<std::uint64_t>(position_ - begin_); }

  template <typename... Args>
  [[noreturn]] void corrupt(fmt::format_string<Args...> format, Args&&... args) const {
    fail(ErrorCode::corrupt, "{}: JSON, byte {}: {}", name_, offset_bytes(),
         fmt::format(format, std::forward<Args>(args)...));
  }

 protected:
  Cursor(ByteView text, const std::string& name, std::uint64_t base_offset)
      : begin_(as_text(text).data()), position_(begin_), base_offset_(base_offset), name_(name) {}
  const char* begin_;
  const char* position_;
  std::uint64_t base_offset_;
  const std::string& name_;
  std::vector<Level> path_;
};

class Visitor {
 public:
  virtual ~Visitor() = default;
  virtual void scalar(const Cursor& at, Scalar value) = 0;
  /// A container begins or has ended; the path is that of the container itself.
  virtual void open(const Cursor& at, bool is_array) = 0;
  virtual void close(const Cursor& at, bool is_array) = 0;
};

inline constexpr std::size_t kMaxDepth = 32;

/// Reads all of `text`. \param base_offset_bytes the offset of `text` in the file named `name`.
void read(ByteView text, const std::string& name, std::uint64_t base_offset_bytes, Visitor& visitor);

/// Returns `text` as a JSON string. Throws `Error(invalid_argument)` naming `what` if it is not UTF-8.
std::string quote(std::string_view text, std::string_view what, bool ascii_only = false);

}  // namespace tessera::json
