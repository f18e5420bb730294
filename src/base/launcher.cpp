#include "tessera/base/launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/internal/free_port.h"
#include "tessera/base/thread_pool.h"

extern char** environ;

namespace tessera {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::array kForwarded = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};
constexpr std::size_t kLineBytes = std::size_t{64} << 10;

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() { close(); }
  int get() const { return number_; }
  bool is_open() const { return number_ >= 0; }
  void close() {
    if (number_ >= 0) ::close(std::exchange(number_, -1));
  }

 private:
  int number_ = -1;
};

struct Pipe {
  Descriptor read, write;
};

Pipe make_pipe(int flags) {
  int ends[2];
  if (::pipe2(ends, flags) != 0) fail(ErrorCode::io, "run ranks: create a pipe: {}", std::strerror(errno));
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

// The signal handler writes the signal's number to a pipe.
int signal_pipe = -1;
extern "C" void write_signal(int number) {
  const int error = errno;
  const auto byte = static_cast<unsigned char>(number);
  [[maybe_unused]] const ssize_t written = ::write(signal_pipe, &byte, 1);
  errno = error;
}

class SignalPipe {
 public:
  SignalPipe() : pipe_(make_pipe(O_CLOEXEC | O_NONBLOCK)) {
    signal_pipe = pipe_.write.get();
    struct sigaction action {};
    action.sa_handler = write_signal;
    action.sa_flags = SA_RESTART;
    for (std::size_t i = 0; i < kForwarded.size(); ++i) {
      ::sigaction(kForwarded[i], nullptr, &before_[i]);
      if (before_[i].sa_handler != SIG_IGN) ::sigaction(kForwarded[i], &action, nullptr);
    }
    ::sigaction(SIGCHLD, &action, &before_child_);
  }
  ~SignalPipe() {
    for (std::size_t i = 0; i < kForwarded.size(); ++i) ::sigaction(kForwarded[i], &before_[i], nullptr);
    ::sigaction(SIGCHLD, &before_child_, nullptr);
  }
  int descriptor() const { return pipe_.read.get(); }
  // Returns the next signal, or 0 if there is none.
  int next() {
    unsigned char byte = 0;
    return ::read(pipe_.read.get(), &byte, 1) == 1 ? byte : 0;
  }
  // Replaces the handlers in a child before exec.
  void restore_in_child() const {
    for (std::size_t i = 0; i < kForwarded.size(); ++i) ::sigaction(kForwarded[i], &before_[i], nullptr);
    std::signal(SIGCHLD, SIG_DFL);
    std::signal(SIGPIPE, SIG_DFL);
    std::signal(SIGXFSZ, SIG_DFL);
  }

 private:
  Pipe pipe_;
  std::array<struct sigaction, kForwarded.size()> before_{};
  struct sigaction before_child_ {};
};

struct Stream {
  Descriptor pipe;
  std::string pending;  // an incomplete line
};

struct Rank {
  pid_t pid = -1;
  bool has_ended = false;
  std::array<Stream, 2> streams;  // standard output and standard error
};

std::vector<std::string> environment_of(int rank, const LaunchOptions& options, std::uint16_t port) {
  std::vector<std::string> own = {
      fmt::format("RANK={}", rank),
      fmt::format("LOCAL_RANK={}", rank),
      fmt::format("WORLD_SIZE={}", options.ranks),
      fmt::format("LOCAL_WORLD_SIZE={}", options.ranks),
      fmt::format("MASTER_ADDR={}", options.master_addr),
      fmt::format("MASTER_PORT={}", port),
  };
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    const std::size_t threads = available_processors() / static_cast<std::size_t>(options.ranks);
    own.push_back(fmt::format("OMP_NUM_THREADS={}", std::max<std::size_t>(1, threads)));
  }
  const auto is_own = [&](std::string_view variable) {
    const std::string_view name = variable.substr(0, variable.find('=') + 1);
    return std::any_of(own.begin(), own.end(), [&](const std::string& mine) { return mine.starts_with(name); });
  };
  // Of a torchrun that started this process, whose store is not that of these ranks.
  constexpr std::string_view kTorchrun = "TORCHELASTIC_";
  std::vector<std::string> all;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (!is_own(*variable) && !std::string_view(*variable).starts_with(kTorchrun)) all.emplace_back(*variable);
  }
  all.insert(all.end(), own.begin(), own.end());
  return all;
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  pointers.reserve(texts.size() + 1);
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

std::string how_it_ended(int status) {
  if (WIFEXITED(status)) return fmt::format("exited with status {}", WEXITSTATUS(status));
  return fmt::format("was ended by signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
}

class Launch {
 public:
  explicit Launch(const LaunchOptions& options) : options_(options), ranks_(static_cast<std::size_t>(options.ranks)) {}
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
  ~Launch() {
    signal_all(SIGKILL);
    for (Rank& rank : ranks_) {
      if (rank.pid > 0 && !rank.has_ended) ::waitpid(rank.pid, nullptr, 0);
    }
  }

  LaunchResult run() {
    const std::uint16_t port = options_.master_port != 0 ? options_.master_port : free_port();
    for (int rank = 0; rank < options_.ranks; ++rank) start(rank, port);
    while (!is_done()) step();
    return result_;
  }

 private:
  void start(int number, std::uint16_t port) {
    Rank& rank = ranks_[static_cast<std::size_t>(number)];
    std::vector<std::string> command = options_.command, environment = environment_of(number, options_, port);
    const std::vector<char*> arguments = pointers_to(command), variables = pointers_to(environment);
    Pipe out = make_pipe(O_CLOEXEC), error = make_pipe(O_CLOEXEC), exec_failure = make_pipe(O_CLOEXEC);
    const pid_t parent = ::getpid();
    rank.pid = ::fork();
    if (rank.pid < 0) fail(ErrorCode::io, "run rank {}: {}", number, std::strerror(errno));
    if (rank.pid == 0) {
      ::setpgid(0, 0);
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(1);
      if (number != 0 || ::isatty(STDIN_FILENO) == 1) {
        const int nothing = ::open("/dev/null", O_RDONLY);
        ::dup2(nothing, STDIN_FILENO);
      }
      ::dup2(out.write.get(), STDOUT_FILENO);
      ::dup2(error.write.get(), STDERR_FILENO);
      signals_.restore_in_child();
      environ = const_cast<char**>(variables.data());
      ::execvp(arguments[0], arguments.data());
      const int reason = errno;
      [[maybe_unused]] const ssize_t written = ::write(exec_failure.write.get(), &reason, sizeof(reason));
      ::_exit(127);
    }
    ::setpgid(rank.pid, rank.pid);
    out.write.close();
    error.write.close();
    exec_failure.write.close();
    int reason = 0;
    if (::read(exec_failure.read.get(), &reason, sizeof(reason)) == sizeof(reason)) {
      fail(reason == ENOENT ? ErrorCode::not_found : ErrorCode::io, "run {}: {}", printable(options_.command[0], 4096),
           std::strerror(reason));
    }
    rank.streams[0].pipe = std::move(out.read);
    rank.streams[1].pipe = std::move(error.read);
  }

  bool is_done() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) {
      return rank.has_ended && !rank.streams[0].pipe.is_open() && !rank.streams[1].pipe.is_open();
    });
  }

  // Waits for output, a signal or the deadline, and handles it.
  void step() {
    std::vector<pollfd> waited = {{signals_.descriptor(), POLLIN, 0}};
    struct Source {
      int rank;
      std::size_t stream;
    };
    std::vector<Source> sources;
    for (int r = 0; r < options_.ranks; ++r) {
      const Rank& rank = ranks_[static_cast<std::size_t>(r)];
      for (std::size_t s = 0; s < rank.streams.size(); ++s) {
        if (!rank.streams[s].pipe.is_open()) continue;
        waited.push_back({rank.streams[s].pipe.get(), POLLIN, 0});
        sources.push_back({r, s});
      }
    }
    int milliseconds = -1;
    if (kill_at_) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(*kill_at_ - Clock::now());
      milliseconds = std::max(0, static_cast<int>(left.count()) + 1);
    }
    ::poll(waited.data(), waited.size(), milliseconds);
    for (std::size_t i = 0; i < sources.size(); ++i) {
      if (waited[i + 1].revents != 0) pass_on(sources[i].rank, sources[i].stream);
    }
    while (const int signal = signals_.next()) {
      if (signal != SIGCHLD) forward(signal);
    }
    reap();
    if (kill_at_ && Clock::now() >= *kill_at_) {
      signal_all(SIGKILL);
      kill_at_.reset();
      // A process that left the process group may hold the pipes open forever.
      for (Rank& rank : ranks_) {
        if (rank.has_ended) close_streams(rank);
      }
    }
  }

  void pass_on(int rank, std::size_t which) {
    Stream& stream = ranks_[static_cast<std::size_t>(rank)].streams[which];
    char buffer[1 << 14];
    const ssize_t got = ::read(stream.pipe.get(), buffer, sizeof(buffer));
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (got <= 0) {
      stream.pipe.close();
      if (!stream.pending.empty()) options_.output(rank, which == 1, stream.pending);
      stream.pending.clear();
      return;
    }
    stream.pending.append(buffer, static_cast<std::size_t>(got));
    std::size_t begin = 0;
    for (std::size_t end; (end = stream.pending.find('\n', begin)) != std::string::npos; begin = end + 1) {
      options_.output(rank, which == 1, std::string_view(stream.pending).substr(begin, end + 1 - begin));
    }
    stream.pending.erase(0, begin);
    if (stream.pending.size() < kLineBytes) return;
    options_.output(rank, which == 1, stream.pending);
    stream.pending.clear();
  }

  void forward(int signal) {
    const bool is_stop = signal == SIGINT || signal == SIGTERM;
    signal_all(is_stop && was_told_to_stop_ ? SIGKILL : signal);
    was_told_to_stop_ = was_told_to_stop_ || is_stop;
  }

  void reap() {
    for (int r = 0; r < options_.ranks; ++r) {
      Rank& rank = ranks_[static_cast<std::size_t>(r)];
      int status = 0;
      if (rank.has_ended || ::waitpid(rank.pid, &status, WNOHANG) != rank.pid) continue;
      rank.has_ended = true;
      ::kill(-rank.pid, SIGTERM);  // processes that it started and left running
      const bool was_last = std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& one) { return one.has_ended; });
      if (was_last && !kill_at_) kill_at_ = Clock::now() + options_.grace;
      if (status == 0 || result_.rank >= 0) continue;
      result_.rank = r;
      result_.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      result_.how = how_it_ended(status);
      signal_all(SIGTERM);
      kill_at_ = Clock::now() + options_.grace;
    }
  }
  static void close_streams(Rank& rank) {
    for (Stream& stream : rank.streams) stream.pipe.close();
  }

  // Signals the process groups of all ranks, including those of ranks that have ended.
  void signal_all(int signal) const {
    for (const Rank& rank : ranks_) {
      if (rank.pid > 0) ::kill(-rank.pid, signal);
    }
  }

  const LaunchOptions& options_;
  SignalPipe signals_;
  std::vector<Rank> ranks_;
  LaunchResult result_;
  bool was_told_to_stop_ = false;
  std::optional<Clock::time_point> kill_at_;
};

}  // namespace

LaunchResult launch_ranks(const LaunchOptions& options) {
  if (options.ranks < 1) fail(ErrorCode::invalid_argument, "run {} ranks: expected at least 1", options.ranks);
  if (options.command.empty())
    fail(ErrorCode::invalid_argument, "run {} ranks: found no program, expected a command", options.ranks);
  return Launch(options).run();
}

}  // namespace tessera
