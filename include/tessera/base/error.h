#pragma once
/// \file
/// The one exception type of the library.
///
/// Law: whatever is wrong with an input (a file, an argument, another rank) is reported by throwing `Error`. Assertions
/// are for defects of this library and never for input. A message says the operation, the file and byte offset (or the
/// tensor and dimension), what was found and what was expected, on one line.

#include <fmt/format.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace tessera {

enum class ErrorCode : std::uint8_t {
  invalid_argument,  ///< the caller asked for something that can't be meant
  corrupt,           ///< bytes that contradict their format, their checksum or each other
  unsupported,       ///< well-formed, and something this version doesn't do
  not_found,         ///< a file, a tensor or an object that isn't there
  io,                ///< the operating system refused or failed
  rank_failure,      ///< another rank failed or died
  cancelled,         ///< stopped on request (a signal, `Cancellation`)
  internal,          ///< a defect of this library
};

/// The code's name as written here, for example "corrupt".
std::string_view error_code_name(ErrorCode code);

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

/// Throws `Error` with a formatted message.
template <typename... Args>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

/// Text as it may be printed inside a one-line message: control characters and invalid UTF-8 as `\xNN`, cut to
/// `limit` bytes with "..." behind.
std::string printable(std::string_view text, std::size_t limit = 200);

}  // namespace tessera
