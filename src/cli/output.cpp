#include "cli/output.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <system_error>

#include "cli/interruption.h"
#include "tessera/base/error.h"

namespace tessera::cli {
namespace {

bool environment_has(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0';
}

// Writes a line, which waits while standard error takes no more. Once the command is told to stop, only what standard
// error takes at once is written: so one signal ends the wait, whenever it comes, and all later ones.
void write_to_standard_error(std::string_view line) {
  constexpr int kWaitMilliseconds = 50;
  while (!line.empty()) {
    pollfd waited{STDERR_FILENO, POLLOUT, 0};
    const int ready = ::poll(&waited, 1, interruption().requested() ? 0 : kWaitMilliseconds);
    if (ready == 0 || (ready < 0 && errno == EINTR)) {
      if (interruption().requested()) return;
      continue;
    }
    // A pipe that is ready takes this much without a wait.
    const ssize_t count = ::write(STDERR_FILENO, line.data(), std::min<std::size_t>(line.size(), PIPE_BUF));
    if (count >= 0) {
      line.remove_prefix(static_cast<std::size_t>(count));
    } else if (errno != EINTR && errno != EAGAIN) {
      return;  // there is no other place to report it
    }
  }
}

// Returns what warnings of one kind have in common: the text, with "..." for what is in quotes and N for a number.
std::string kind_of_warning(std::string_view message) {
  std::string kind;
  bool in_quotes = false, in_word = false, in_number = false;
  for (const char c : message) {
    if (c == '\'') {
      if (!in_quotes) kind += "'...'";
      in_quotes = !in_quotes;
      in_word = in_number = false;
      continue;
    }
    if (in_quotes) continue;
    const bool is_digit = c >= '0' && c <= '9';
    if (is_digit && !in_word) {
      if (!in_number) kind += 'N';
      in_number = true;
      continue;
    }
    in_number = false;
    in_word = is_digit || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
    kind += c;
  }
  return kind;
}

}  // namespace

void occupy_standard_streams() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // open() returns the lowest free descriptor, which is this one: those below it are open by now.
    if (::fcntl(descriptor, F_GETFD) < 0 && ::open("/dev/null", O_RDONLY) < 0) return;
  }
}

int write_all(int descriptor, std::string_view text, const Cancellation* cancellation) {
  while (!text.empty()) {
    const ssize_t count = ::write(descriptor, text.data(), text.size());
    if (count >= 0) {
      text.remove_prefix(static_cast<std::size_t>(count));
    } else if (errno == EAGAIN) {
      pollfd waited{descriptor, POLLOUT, 0};
      ::poll(&waited, 1, -1);
    } else if (errno != EINTR) {
      return errno;
    }
    // A signal ends a blocked write, with EINTR or with a part written, and a wait.
    if (cancellation != nullptr && !text.empty()) cancellation->check();
  }
  return 0;
}

Output::Output(const Cancellation& cancellation) : cancellation_(cancellation) {
  const bool is_terminal = ::isatty(STDOUT_FILENO) != 0;
  const char* forced = std::getenv("CLICOLOR_FORCE");
  const bool is_forced = forced != nullptr && *forced != '\0' && std::string_view(forced) != "0";
  const char* terminal = std::getenv("TERM");
  const bool can = is_terminal && terminal != nullptr && std::string_view(terminal) != "dumb";
  attributes_ = !environment_has("NO_COLOR") && (can || is_forced);
  if (!is_terminal) return;
  winsize size{};
  columns_ = ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

void Output::write(std::string_view text) {
  buffer_ += text;
  if (buffer_.size() >= kFlushBytes) flush();
}

void Output::write_formatted(fmt::string_view format, fmt::format_args args) {
  buffer_ += fmt::vformat(format, args);
  if (buffer_.size() >= kFlushBytes) flush();
}

void Output::flush() {
  const int reason = write_all(STDOUT_FILENO, buffer_, &cancellation_);
  buffer_.clear();
  if (reason == EPIPE) throw ClosedPipe();
  if (reason != 0) fail(ErrorCode::io, "write to standard output: {}", std::generic_category().message(reason));
}

std::string Output::bold(std::string_view text) const {
  return attributes_ ? fmt::format("\x1b[1m{}\x1b[0m", text) : std::string(text);
}

std::string Output::faint(std::string_view text) const {
  return attributes_ ? fmt::format("\x1b[2m{}\x1b[0m", text) : std::string(text);
}

std::string counted(std::size_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

std::string one_line(std::string_view text) {
  std::string line(text);
  while (!line.empty() && line.back() == '\n') line.pop_back();
  std::replace(line.begin(), line.end(), '\n', ' ');
  return printable(line, SIZE_MAX);
}

void print_error(std::string_view message) { write_to_standard_error("tessera: " + one_line(message) + "\n"); }
void print_warning(std::string_view message) {
  write_to_standard_error("tessera: warning: " + one_line(message) + "\n");
}

void print_warnings(const std::vector<std::string>& messages, bool all) {
  constexpr std::size_t kShown = 5;
  std::map<std::string, std::size_t> counts;
  std::vector<std::string> kinds;
  for (const std::string& message : messages) {
    std::string kind = kind_of_warning(message);
    const std::size_t count = ++counts[kind];
    if (all || count <= kShown) print_warning(message);
    if (count == kShown + 1) kinds.push_back(std::move(kind));
  }
  if (all) return;
  for (const std::string& kind : kinds) {
    print_warning(
        fmt::format("and {} more of the kind \"{}\"; --all-warnings shows them", counts[kind] - kShown, kind));
  }
}

}  // namespace tessera::cli
