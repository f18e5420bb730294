#pragma once
// Ranks as processes, forked from the test, which must not have threads yet.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/base/internal/free_port.h"
#include "tessera/comm/init.h"

namespace tessera::testing {

// Law: no test fails because the machine is slow. What must not wait for a timeout takes less than this on every
// machine, and that timeout is longer.
constexpr std::chrono::seconds kSoon(60);
constexpr std::chrono::seconds kLongTimeout(300);

// Options with which a dead rank is noticed soon.
inline InitOptions quick() {
  InitOptions options;
  options.liveness = std::chrono::seconds(1);
  options.timeout = kLongTimeout;
  return options;
}

// Returns whether `is_so` becomes true soon, for events that cannot be waited for.
inline bool soon(FunctionRef<bool()> is_so) {
  const auto deadline = std::chrono::steady_clock::now() + kSoon;
  while (!is_so()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

struct RankOutcome {
  int signal = 0;      // the signal that ended it, if any
  std::string report;  // the result, "code: message" of an Error, or "exception: message"
};

// Runs `f` in one process per rank of a world and returns the outcome of each.
inline std::vector<RankOutcome> run_processes(int ranks, InitOptions options,
                                              FunctionRef<std::string(const ProcessGroup&)> f) {
  options.world_size = ranks;
  options.master_port = free_port();
  struct Child {
    pid_t pid;
    int pipe;
  };
  std::vector<Child> children;
  for (options.rank = 0; options.rank < ranks; ++options.rank) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("no pipe");
    std::fflush(stdout);
    const pid_t pid = ::fork();
    if (pid < 0) throw std::runtime_error("fork");
    if (pid == 0) {
      std::string report;
      try {
        report = f(init_process_group(options));
      } catch (const Error& error) {
        report = std::string(error_code_name(error.code())) + ": " + error.what();
      } catch (const std::exception& error) {
        report = std::string("exception: ") + error.what();
      }
      std::fflush(stdout);
      const bool is_written = ::write(ends[1], report.data(), report.size()) == static_cast<ssize_t>(report.size());
      ::_exit(is_written ? 0 : 1);
    }
    ::close(ends[1]);
    children.push_back({pid, ends[0]});
  }
  std::vector<RankOutcome> outcomes;
  for (const Child& child : children) {
    RankOutcome outcome;
    char buffer[4096];
    for (ssize_t got = 0; (got = ::read(child.pipe, buffer, sizeof(buffer))) > 0;) {
      outcome.report.append(buffer, static_cast<std::size_t>(got));
    }
    ::close(child.pipe);
    int status = 0;
    ::waitpid(child.pid, &status, 0);
    if (WIFSIGNALED(status)) {
      outcome.signal = WTERMSIG(status);
      outcome.report += "ended by signal " + std::to_string(outcome.signal);
    }
    outcomes.push_back(outcome);
  }
  return outcomes;
}

// Runs `f` in one process per rank. Expects it to return on every rank without a failed expectation; the process prints
// those.
inline void expect_good_processes(int ranks, const InitOptions& options, FunctionRef<void(const ProcessGroup&)> f) {
  const std::vector<RankOutcome> outcomes = run_processes(ranks, options, [&](const ProcessGroup& group) {
    f(group);
    return std::string(::testing::Test::HasFailure() ? "failed" : "good");
  });
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank)
    EXPECT_EQ(outcomes[rank].report, "good") << "rank " << rank;
}

}  // namespace tessera::testing
