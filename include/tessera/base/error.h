#pragma once
/// \file
/// The exception type of the library.
///
/// Law: every problem with an input (a file, an argument, another rank) is reported by throwing `Error`. Assertions
/// catch defects of this library, never bad input. A message is one line. It names the operation, the file and byte
/// offset (or the tensor and dimension), what was found and what was expected.

#include <fmt/format.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace tessera {

/// The kind of an error, for programs. The message is for people.
enum class ErrorCode : std::uint8_t {
  invalid_argument,  ///< invalid or inconsistent arguments
  corrupt,           ///< bytes that contradict their format, their checksum or each other
  unsupported,       ///< well-formed input that this version does not handle
  not_found,         ///< a file, a tensor or an object that does not exist
  io,                ///< the operating system refused or failed
  rank_failure,      ///< another rank failed or died
  cancelled,         ///< stopped on request (a signal, `Cancellation`)
  internal,          ///< a defect of this library
};

/// Returns the name of the enumerator, for example "corrupt".
std::string_view error_code_name(ErrorCode code);

/// An error with a code and a one-line message.
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

/// Returns f(). If it throws an `Error`, throws it with "<where()>: " before its message.
template <typename Where, typename F>
auto with_context(const Where& where, F&& f) {
  try {
    return std::forward<F>(f)();
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("{}: {}", where(), error.what()));
  }
}

/// Escapes text for a one-line message: control characters, those that change the direction of text, and invalid UTF-8
/// become `\xNN`. Text longer than `limit` bytes is truncated, with "..." appended.
std::string printable(std::string_view text, std::size_t limit = 200);

}  // namespace tessera
