#include "cli/command.h"
#include "support/paths.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <pty.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace tessera::testing {
namespace fs = std::filesystem;
namespace {

struct Pipe {
  int read = -1, write = -1;
  Pipe() {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
    read = ends[0];
    write = ends[1];
  }
};

void make_small(const Pipe& pipe) { ::fcntl(pipe.write, F_SETPIPE_SZ, 4096); }

void make_non_blocking(const Pipe& pipe) { ::fcntl(pipe.write, F_SETFL, O_WRONLY | O_NONBLOCK); }

// Runs in the child, before exec.
void apply(const Conditions& conditions) {
  if (conditions.without_root_rights && ::geteuid() == 0) {
    // Programs started as root ignore file modes unless these capabilities are dropped.
    for (const int capability : {CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH}) {
      if (::prctl(PR_CAPBSET_DROP, capability) != 0) ::_exit(126);
    }
  }
  for (const auto& [name, value] : conditions.environment) ::setenv(name.c_str(), value.c_str(), 1);
  for (const int descriptor : conditions.closed) ::close(descriptor);
  if (conditions.max_file) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{*conditions.max_file, *conditions.max_file};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) ::_exit(126);
  }
}

pid_t start(const std::vector<std::string>& command, int out, int err, const Conditions& conditions) {
  std::vector<char*> argv;
  for (const std::string& part : command) argv.push_back(const_cast<char*>(part.c_str()));
  argv.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid < 0) throw std::runtime_error("fork");
  if (pid != 0) return pid;
  ::dup2(out, STDOUT_FILENO);
  ::dup2(err, STDERR_FILENO);
  const int nothing = ::open("/dev/null", O_RDONLY);
  ::dup2(nothing, STDIN_FILENO);
  apply(conditions);
  ::execvp(argv[0], argv.data());
  ::_exit(127);
}

// Reads both pipes until both are closed.
void drain(int out, int err, Outcome& outcome) {
  std::array<pollfd, 2> polled = {{{out, POLLIN, 0}, {err, POLLIN, 0}}};
  std::array<std::string*, 2> texts = {&outcome.out, &outcome.err};
  std::array<char, 4096> buffer{};
  while (polled[0].fd >= 0 || polled[1].fd >= 0) {
    if (::poll(polled.data(), polled.size(), -1) < 0) continue;
    for (std::size_t i = 0; i < polled.size(); ++i) {
      if (polled[i].fd < 0 || polled[i].revents == 0) continue;
      const ssize_t count = ::read(polled[i].fd, buffer.data(), buffer.size());
      if (count > 0) {
        texts[i]->append(buffer.data(), static_cast<std::size_t>(count));
      } else {
        ::close(polled[i].fd);
        polled[i].fd = -1;
      }
    }
  }
}

void wait_for_input(int descriptor) {
  pollfd polled{descriptor, POLLIN, 0};
  while (::poll(&polled, 1, -1) < 0) {
  }
}

int wait_for(pid_t pid) {
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

std::vector<std::string> with_program(const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {tessera::testing::command_path()};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return command;
}

}  // namespace

Outcome run_program(const std::vector<std::string>& command, const Conditions& conditions) {
  Pipe out, err;
  int standard_output = out.write;
  if (!conditions.stdout_file.empty()) standard_output = ::open(conditions.stdout_file.c_str(), O_WRONLY | O_CLOEXEC);
  if (conditions.stdout_non_blocking) {
    make_small(out);
    make_non_blocking(out);
  }
  if (conditions.stdout_closed_pipe) {
    Pipe dead;
    ::close(dead.read);
    standard_output = dead.write;
  }
  if (conditions.terminal_columns) {
    int near = -1;
    winsize size{};
    size.ws_col = *conditions.terminal_columns;
    size.ws_row = 24;
    if (::openpty(&near, &standard_output, nullptr, nullptr, &size) != 0) throw std::runtime_error("openpty");
    for (const int descriptor : {near, standard_output}) ::fcntl(descriptor, F_SETFD, FD_CLOEXEC);
    ::close(out.read);
    out.read = near;
  }
  const pid_t pid = start(command, standard_output, err.write, conditions);
  if (standard_output != out.write) ::close(standard_output);
  ::close(out.write);
  ::close(err.write);
  Outcome outcome;
  drain(out.read, err.read, outcome);
  outcome.status = wait_for(pid);
  return outcome;
}

Outcome run_tessera(const std::vector<std::string>& arguments, const Conditions& conditions) {
  return run_program(with_program(arguments), conditions);
}

Running::Running(const std::vector<std::string>& arguments, const Conditions& conditions) {
  Pipe out, err;
  make_small(out);
  if (conditions.stdout_non_blocking) make_non_blocking(out);
  if (conditions.stderr_small) make_small(err);
  pid_ = start(with_program(arguments), out.write, err.write, conditions);
  ::close(out.write);
  ::close(err.write);
  out_ = out.read;
  err_ = err.read;
}

Running::~Running() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  finish();
}

void Running::wait_for_output() const { wait_for_input(out_); }
void Running::wait_for_errors() const { wait_for_input(err_); }

bool Running::wait_until_it_has_read(std::uint64_t bytes) const {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (std::chrono::steady_clock::now() < deadline) {
    std::ifstream io("/proc/" + std::to_string(pid_) + "/io");
    std::string label;
    std::uint64_t count = 0;
    if (io >> label >> count && label == "rchar:" && count >= bytes) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

void Running::signal(int number) const { ::kill(pid_, number); }

bool Running::has_ended() const {
  siginfo_t end{};
  return ::waitid(P_PID, static_cast<id_t>(pid_), &end, WEXITED | WNOHANG | WNOWAIT) == 0 && end.si_pid == pid_;
}

bool Running::wait_until_it_has_ended() const {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  while (!has_ended() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return has_ended();
}

Outcome Running::finish() {
  Outcome outcome;
  drain(out_, err_, outcome);
  outcome.status = wait_for(pid_);
  pid_ = -1;
  return outcome;
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> found;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) found.push_back(entry.path().filename());
  std::sort(found.begin(), found.end());
  return found;
}

std::string golden(const std::string& name) {
  return tessera::testing::source_dir() + "/tests/golden/checkpoints/" + name + "/ck";
}

std::string demo() { return tessera::testing::source_dir() + "/tests/golden/demo/ck"; }

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void write_text(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

void write_sparse_safetensors(const fs::path& path, int tensors, std::uint64_t bytes) {
  nlohmann::json header;
  for (int i = 0; i < tensors; ++i) {
    const std::uint64_t begin = static_cast<std::uint64_t>(i) * bytes;
    header["t" + std::to_string(i)] = {{"dtype", "U8"}, {"shape", {bytes}}, {"data_offsets", {begin, begin + bytes}}};
  }
  std::string text = header.dump();
  text.append(8 - text.size() % 8, ' ');
  std::string length;
  for (int i = 0; i < 8; ++i) length += static_cast<char>(text.size() >> (8 * i));
  write_text(path, length + text);
  fs::resize_file(path, 8 + text.size() + static_cast<std::uint64_t>(tensors) * bytes);
}

bool is_one_error_line(const std::string& text) {
  return text.starts_with("tessera: ") && text.size() > 10 && text.find('\n') == text.size() - 1;
}

}  // namespace tessera::testing
