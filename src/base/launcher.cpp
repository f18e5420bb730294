#include "tessera/base/launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/internal/free_port.h"
#include "tessera/base/internal/timeout.h"
#include "tessera/base/thread_pool.h"

extern char** environ;

namespace tessera {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::array kForwarded = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};
constexpr bool is_stop(int signal) { return signal == SIGINT || signal == SIGTERM; }
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

// Keeps signals pending in this thread, and in a child, until it is destroyed or released.
class SignalBlock {
 public:
  SignalBlock() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  SignalBlock(const SignalBlock&) = delete;
  SignalBlock& operator=(const SignalBlock&) = delete;
  ~SignalBlock() { release(); }
  void release() const { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

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
  // Lets the next signal to stop end this process.
  void release_stops() const {
    for (std::size_t i = 0; i < kForwarded.size(); ++i) {
      if (is_stop(kForwarded[i]) && before_[i].sa_handler != SIG_IGN) std::signal(kForwarded[i], SIG_DFL);
    }
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
  std::array<Stream, 2> streams;             // standard output and standard error
  std::atomic<bool> must_end_output{false};  // what its pipes hold is the last that is delivered
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

std::string how_it_ended(const siginfo_t& end) {
  if (end.si_code == CLD_EXITED) return fmt::format("exited with status {}", end.si_status);
  return fmt::format("was ended by signal {} ({})", end.si_status, ::strsignal(end.si_status));
}

// This thread forwards signals, notices ends and keeps the deadlines. Another one delivers the output, which may take
// it any time.
class Launch {
 public:
  explicit Launch(const LaunchOptions& options) : options_(options), ranks_(static_cast<std::size_t>(options.ranks)) {}
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
  ~Launch() {
    signal_all(SIGKILL);
    if (delivery_.joinable()) {
      for (Rank& rank : ranks_) rank.must_end_output = true;
      wake_delivery();
      delivery_.join();
    }
    for (const Rank& rank : ranks_) {
      if (rank.pid > 0) ::waitpid(rank.pid, nullptr, 0);
    }
  }

  LaunchResult run() {
    const std::uint16_t port = options_.master_port != 0 ? options_.master_port : free_port();
    for (int rank = 0; rank < options_.ranks; ++rank) start(rank, port);
    start_delivery();
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
    const SignalBlock block;  // until the child has handlers of its own: this process's write to its pipe
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
      block.release();
      environ = const_cast<char**>(variables.data());
      ::execvp(arguments[0], arguments.data());
      const int reason = errno;
      [[maybe_unused]] const ssize_t written = ::write(exec_failure.write.get(), &reason, sizeof(reason));
      ::_exit(127);
    }
    ::setpgid(rank.pid, rank.pid);
    block.release();
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

  void start_delivery() {
    const SignalBlock block;  // in that thread for ever
    try {
      delivery_ = std::thread([this] { deliver(); });
    } catch (const std::system_error& error) {
      fail(ErrorCode::io, "run ranks: start a thread: {}", error.what());
    }
  }

  bool is_done() const {
    return is_delivered_ && std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.has_ended; });
  }

  // Waits for a signal, the end of the output or the deadline, and handles it.
  void step() {
    std::array<pollfd, 2> waited = {{{signals_.descriptor(), POLLIN, 0}, {-1, POLLIN, 0}}};
    if (!is_delivered_) waited[1].fd = delivered_.read.get();
    int milliseconds = -1;
    if (kill_at_) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(*kill_at_ - Clock::now());
      constexpr std::int64_t kMost = std::numeric_limits<int>::max();
      milliseconds = static_cast<int>(std::clamp<std::int64_t>(left.count() + 1, 0, kMost));
    }
    ::poll(waited.data(), waited.size(), milliseconds);
    if (waited[1].revents != 0) {
      is_delivered_ = true;
      delivery_.join();
      if (delivery_error_) std::rethrow_exception(delivery_error_);
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
        if (rank.has_ended) rank.must_end_output = true;
      }
      wake_delivery();
    }
  }

  void wake_delivery() const { [[maybe_unused]] const ssize_t written = ::write(wake_.write.get(), "", 1); }

  // Delivers the output until all streams are closed. Runs in the other thread, to which the streams belong.
  void deliver() {
    try {
      while (wait_for_output()) {
      }
    } catch (...) {
      delivery_error_ = std::current_exception();
    }
    delivered_.write.close();
  }

  // Waits for output and delivers it; returns false if all streams are closed.
  bool wait_for_output() {
    std::vector<pollfd> waited = {{wake_.read.get(), POLLIN, 0}};
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
    if (sources.empty()) return false;
    ::poll(waited.data(), waited.size(), -1);
    for (std::size_t i = 0; i < sources.size(); ++i) {
      if (waited[i + 1].revents != 0) pass_on(sources[i].rank, sources[i].stream);
    }
    if (waited[0].revents == 0) return true;
    char woken = 0;
    [[maybe_unused]] const ssize_t got = ::read(wake_.read.get(), &woken, 1);
    for (const Source& source : sources) {
      if (ranks_[static_cast<std::size_t>(source.rank)].must_end_output) end_stream(source.rank, source.stream);
    }
    return true;
  }

  // Reads from a stream once, and delivers lines. Returns how many bytes were read.
  std::size_t pass_on(int rank, std::size_t which) {
    Stream& stream = ranks_[static_cast<std::size_t>(rank)].streams[which];
    char buffer[1 << 14];
    const ssize_t got = ::read(stream.pipe.get(), buffer, sizeof(buffer));
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) return 0;
    if (got <= 0) {
      close_stream(rank, which);
      return 0;
    }
    stream.pending.append(buffer, static_cast<std::size_t>(got));
    std::size_t begin = 0;
    for (std::size_t end; (end = stream.pending.find('\n', begin)) != std::string::npos; begin = end + 1) {
      options_.output(rank, which == 1, std::string_view(stream.pending).substr(begin, end + 1 - begin));
    }
    stream.pending.erase(0, begin);
    if (stream.pending.size() >= kLineBytes) deliver_pending(rank, which);
    return static_cast<std::size_t>(got);
  }

  void deliver_pending(int rank, std::size_t which) {
    const std::string pending = std::exchange(ranks_[static_cast<std::size_t>(rank)].streams[which].pending, {});
    if (!pending.empty()) options_.output(rank, which == 1, pending);
  }

  void close_stream(int rank, std::size_t which) {
    ranks_[static_cast<std::size_t>(rank)].streams[which].pipe.close();
    deliver_pending(rank, which);
  }

  // Closes a stream after delivering what its pipe holds, and no more: other processes may write without end.
  void end_stream(int rank, std::size_t which) {
    const Descriptor& pipe = ranks_[static_cast<std::size_t>(rank)].streams[which].pipe;
    if (!pipe.is_open()) return;
    int available = 0;
    ::ioctl(pipe.get(), FIONREAD, &available);
    for (auto left = static_cast<std::size_t>(available); left > 0 && pipe.is_open();)
      left -= std::min(left, pass_on(rank, which));
    close_stream(rank, which);
  }

  void forward(int signal) {
    const bool is_second = is_stop(signal) && was_told_to_stop_;
    signal_all(is_second ? SIGKILL : signal);
    if (is_second) signals_.release_stops();
    was_told_to_stop_ = was_told_to_stop_ || is_stop(signal);
  }

  void reap() {
    for (int r = 0; r < options_.ranks; ++r) {
      Rank& rank = ranks_[static_cast<std::size_t>(r)];
      // ~Launch waits for it: until then no other process group gets its number.
      siginfo_t end{};
      if (rank.has_ended || ::waitid(P_PID, static_cast<id_t>(rank.pid), &end, WEXITED | WNOHANG | WNOWAIT) != 0 ||
          end.si_pid == 0)
        continue;
      rank.has_ended = true;
      ::kill(-rank.pid, SIGTERM);  // processes that it started and left running
      const bool was_last = std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& one) { return one.has_ended; });
      if (was_last && !kill_at_) kill_at_ = Clock::now() + bounded(options_.grace);
      const int status = end.si_code == CLD_EXITED ? end.si_status : 128 + end.si_status;
      if (status == 0 || result_.rank >= 0) continue;
      result_.rank = r;
      result_.status = status;
      result_.how = how_it_ended(end);
      signal_all(SIGTERM);
      kill_at_ = Clock::now() + bounded(options_.grace);
    }
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
  Pipe wake_ = make_pipe(O_CLOEXEC);       // to the other thread
  Pipe delivered_ = make_pipe(O_CLOEXEC);  // which closes it when it ends
  bool is_delivered_ = false;
  std::exception_ptr delivery_error_;
  std::thread delivery_;
};

}  // namespace

LaunchResult launch_ranks(const LaunchOptions& options) {
  if (options.ranks < 1) fail(ErrorCode::invalid_argument, "run {} ranks: expected at least 1", options.ranks);
  if (options.command.empty())
    fail(ErrorCode::invalid_argument, "run {} ranks: found no program, expected a command", options.ranks);
  return Launch(options).run();
}

}  // namespace tessera
