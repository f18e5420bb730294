#pragma once
// Standard output and standard error of the command. A failed write to standard output is an error.

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/cancellation.h"

namespace tessera::cli {

// Opens /dev/null for reading on each of the descriptors 0 to 2 that is closed. Otherwise a file could get its number
// and receive the output. Writing to such a descriptor still fails.
void occupy_standard_streams();

// Writes all of `text`. Waits while the descriptor takes no more, also if another program that shares it has made it
// non-blocking. Returns 0, or the error number of a write that failed. Throws Error(cancelled) if a signal ended a wait
// and `cancellation` is requested.
int write_all(int descriptor, std::string_view text, const Cancellation* cancellation = nullptr);

// Thrown if the reader of standard output has closed the pipe (EPIPE). The command then ends without a message.
struct ClosedPipe {};

// Standard output, buffered. Functions that write throw Error(io) or ClosedPipe if the write fails, and
// Error(cancelled) if the command is interrupted while it blocks.
class Output {
 public:
  explicit Output(const Cancellation& cancellation);

  void write(std::string_view text);
  template <typename... Args>
  void print(fmt::format_string<const Args&...> format, const Args&... args) {
    write_formatted(format, fmt::make_format_args(args...));
  }
  void flush();

  // The width of the terminal; 0 (no limit) if standard output is not a terminal.
  std::size_t columns() const { return columns_; }
  // Returns `text` with terminal attributes; unchanged if standard output is not a terminal that
  // knows them, unless CLICOLOR_FORCE is set and not 0, or if NO_COLOR is set.
  std::string bold(std::string_view text) const;
  std::string faint(std::string_view text) const;

 private:
  void write_formatted(fmt::string_view format, fmt::format_args args);

  static constexpr std::size_t kFlushBytes = 1 << 16;
  const Cancellation& cancellation_;
  std::string buffer_;
  std::size_t columns_ = 0;
  bool attributes_ = false;
};

// Returns `text` on one line: newlines become spaces, other control characters and invalid UTF-8 are escaped.
std::string one_line(std::string_view text);

// "1 file", "2 files"
std::string counted(std::size_t count, std::string_view noun);

// Write "tessera: <message>" or "tessera: warning: <message>" to standard error, on one line. Errors are ignored. Wait
// while standard error takes no more, unless the command is told to stop (see watch_signals): then the rest is left
// out.
void print_error(std::string_view message);
void print_warning(std::string_view message);

// Prints warnings. Of those that differ in names and numbers only, prints the first 5 and the number of the others,
// unless `all`.
void print_warnings(const std::vector<std::string>& messages, bool all);

}  // namespace tessera::cli
