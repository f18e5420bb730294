#pragma once
// Standard output and standard error of the command. What could not be written is an error, not a silence.

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

#include "tessera/base/cancellation.h"

namespace tessera::cli {

// Opens what is closed of the descriptors 0 to 2, so that no file of ours gets one of them and, with it, what is meant
// for a reader. What is written there still fails.
void occupy_standard_streams();

// Whoever reads our output has gone (EPIPE). The command ends without a word, as other tools do.
struct ClosedPipe {};

// Standard output, buffered. Throws Error(io) or ClosedPipe where the system refuses; Error(cancelled) if a request to
// stop comes while it blocks.
class Output {
 public:
  explicit Output(const Cancellation& cancellation);

  void write(std::string_view text);
  template <typename... Args>
  void print(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(buffer_), format, std::forward<Args>(args)...);
    if (buffer_.size() >= kFlushBytes) flush();
  }
  void flush();

  // Columns to use: the terminal's, or 0 (no limit) where standard output is none.
  std::size_t columns() const { return columns_; }
  // Terminal attributes around `text`, or `text` alone where standard output is no terminal or NO_COLOR is set.
  std::string bold(std::string_view text) const;
  std::string faint(std::string_view text) const;

 private:
  static constexpr std::size_t kFlushBytes = 1 << 16;
  const Cancellation& cancellation_;
  std::string buffer_;
  std::size_t columns_ = 0;
  bool attributes_ = false;
};

// `text` fit for one line: newlines become spaces, other control characters and invalid UTF-8 are escaped.
std::string one_line(std::string_view text);

// "1 file", "2 files"
std::string counted(std::size_t count, std::string_view noun);

// "tessera: <message>" on standard error, one line. A failure to write it is ignored.
void print_error(std::string_view message);
void print_warning(std::string_view message);

}  // namespace tessera::cli
