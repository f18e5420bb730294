// The main function of every test program. Each case runs in a process of its own, forked before the program has
// threads: cases share no state, ranks may be forked from them, and a case that crashes or hangs fails alone. LibTorch
// is loaded once for a program, not once for each case.
//
// With AddressSanitizer a process costs more than most cases, above all the search for leaks at its end. So there many
// cases run in one process first. If one fails or forks there, its output is dropped and it runs in a process of its
// own, which decides.
//
//   --in-process     runs all cases in this process, for a debugger
//
// The other flags are GoogleTest's. With TESSERA_TEST_TIMES=FILE the duration of each case is appended to FILE.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <iostream>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/chaos.h"

// Defined in programs that a sanitizer is linked to.
extern "C" __attribute__((weak)) void __lsan_do_leak_check();  // NOLINT: a name of the sanitizer's

namespace {

using Clock = std::chrono::steady_clock;
constexpr unsigned kCaseSeconds = 600;
constexpr std::size_t kTogether = 50;
constexpr std::chrono::seconds kTogetherTime(20);
constexpr int kSkipped = 77;  // CTest's and automake's status of a skipped test

// Whether LeakSanitizer searches at the end of this process, which takes longer than most cases run.
bool leaks_are_searched = true;

// Prints failed and skipped cases, and nothing for a case that passed.
class FailurePrinter : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (result.passed()) return;
    std::printf("%s:%d: %s\n%s\n", result.file_name() ? result.file_name() : "", std::max(result.line_number(), 0),
                result.skipped() ? "skipped" : "failed", result.message());
  }
};

// The part of the cases that this program runs.
struct CaseShard {
  std::size_t index = 0, count = 1;
};

// Reads the shard that CTest has put into the environment. GoogleTest's own variables would divide each single case
// again.
CaseShard shard_of_environment() {
  CaseShard shard;
  if (const char* index = std::getenv("TESSERA_TEST_SHARD")) shard.index = std::strtoull(index, nullptr, 10);
  if (const char* count = std::getenv("TESSERA_TEST_SHARDS")) shard.count = std::strtoull(count, nullptr, 10);
  shard.count = std::max<std::size_t>(shard.count, 1);
  return shard;
}

// Returns the cases that the filter and the shard select. Listing them makes GoogleTest apply the filter.
std::vector<std::string> selected_cases(const CaseShard& shard) {
  ::testing::internal::CaptureStdout();
  GTEST_FLAG_SET(list_tests, true);
  const int listed = RUN_ALL_TESTS();
  GTEST_FLAG_SET(list_tests, false);
  ::testing::internal::GetCapturedStdout();
  if (listed != 0) std::exit(listed);
  const auto* unit_test = ::testing::UnitTest::GetInstance();
  std::vector<std::string> names;
  std::size_t number = 0;
  for (int i = 0; i < unit_test->total_test_suite_count(); ++i) {
    const ::testing::TestSuite* suite = unit_test->GetTestSuite(i);
    for (int k = 0; k < suite->total_test_count(); ++k) {
      const ::testing::TestInfo* info = suite->GetTestInfo(k);
      if (info->should_run() && number++ % shard.count == shard.index)
        names.push_back(std::string(suite->name()) + "." + info->name());
    }
  }
  return names;
}

// Returns the name without the parameter's: "Worlds/GatherTest.Gathers" of "Worlds/GatherTest.Gathers/3".
std::string_view without_parameter(std::string_view name) {
  const std::size_t dot = name.find('.');
  return name.substr(0, name.find('/', dot == std::string_view::npos ? 0 : dot));
}

// Ends the process of a case without destroying LibTorch's global objects, which takes longer than most cases do. What
// LeakSanitizer does at exit is done here; the other sanitizers report at once, or in _exit.
[[noreturn]] void end_case(int status) {
  std::cout.flush();
  std::fflush(nullptr);
  if (leaks_are_searched && __lsan_do_leak_check != nullptr) __lsan_do_leak_check();
  ::_exit(status);
}

int status_of_wait(pid_t pid) {
  int status = 0;
  while (::waitpid(pid, &status, 0) != pid) {
  }
  return status;
}

// Runs a case in this process. Returns the status with which a process of its own ends.
int run_here(const std::string& name) {
  GTEST_FLAG_SET(filter, name);
  const int failed = RUN_ALL_TESTS();
  if (::testing::UnitTest::GetInstance()->test_to_run_count() != 1) {
    std::fprintf(stderr, "%s: was not run\n", name.c_str());
    return 1;
  }
  const bool skipped = ::testing::UnitTest::GetInstance()->skipped_test_count() != 0;
  return failed != 0 ? 1 : skipped ? kSkipped : 0;
}

// Runs the case `name` and returns the status of waitpid().
int run_case(const std::string& name, bool search_leaks) {
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid < 0) {
    std::perror("fork");
    std::exit(1);
  }
  if (pid == 0) {
    ::alarm(kCaseSeconds * static_cast<unsigned>(tessera::testing::chaos_factor()));
    leaks_are_searched = search_leaks;
    end_case(run_here(name));
  }
  return status_of_wait(pid);
}

struct Outcome {
  int status;  // of waitpid()
  long milliseconds;
};

long milliseconds_since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count();
}

// What the process of run_together() has done, in memory that it shares.
struct Progress {
  std::size_t done;  // cases that passed or were skipped
  bool is_stopped;   // the next one must run alone
  Outcome outcomes[kTogether];
};
Progress* progress = nullptr;

// Ends that process where it cannot go further: after a case that failed, and before one forks, since the process has
// threads, of which a child would have none. What was done until then counts.
[[noreturn]] void end_early() {
  progress->is_stopped = true;
  if (progress->done > 0) end_case(0);
  ::_exit(1);
}

struct Together {
  std::vector<Outcome> outcomes;  // of the cases that passed or were skipped
  bool is_stopped;                // the next one must run alone
  bool is_clean;                  // they leak nothing, and nothing crashed
};

// Runs at most kTogether cases in one process, which searches for leaks once, until one fails or forks or some seconds
// are over.
Together run_together(std::span<const std::string> names) {
  void* const memory = ::mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return {};
  progress = static_cast<Progress*>(memory);
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::alarm(kCaseSeconds * static_cast<unsigned>(tessera::testing::chaos_factor()));
    const int nowhere = ::open("/dev/null", O_WRONLY);
    ::dup2(nowhere, STDOUT_FILENO);
    ::dup2(nowhere, STDERR_FILENO);
    ::pthread_atfork(end_early, nullptr, nullptr);
    const auto begin = Clock::now();
    for (std::size_t i = 0; i < names.size() && Clock::now() - begin < kTogetherTime; ++i) {
      const auto start = Clock::now();
      const int status = run_here(names[i]);
      if (status != 0 && status != kSkipped) end_early();
      progress->outcomes[i] = {status << 8, milliseconds_since(start)};
      progress->done = i + 1;
    }
    end_case(0);
  }
  const bool is_clean = pid > 0 && status_of_wait(pid) == 0;
  Together result{{progress->outcomes, progress->outcomes + progress->done}, progress->is_stopped, is_clean};
  ::munmap(memory, sizeof(Progress));
  return result;
}

int run_each_case_in_a_process(const std::vector<std::string>& names) {
  const char* times_file = std::getenv("TESSERA_TEST_TIMES");
  std::ofstream times;
  if (times_file != nullptr) times.open(times_file, std::ios::app);
  const bool are_processes_slow = __lsan_do_leak_check != nullptr;
  std::vector<std::string> failed;
  std::deque<Outcome> together;                   // of the case `i` and those after it, if they passed in one process
  std::set<std::string_view, std::less<>> alone;  // tests that did not, without their parameters
  std::size_t skipped = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::string& name = names[i];
    if (are_processes_slow && together.empty()) {
      std::size_t count = 0;
      while (count < kTogether && i + count < names.size() && !alone.contains(without_parameter(names[i + count])))
        ++count;
      if (count > 1) {
        const auto [outcomes, is_stopped, is_clean] = run_together(std::span(names).subspan(i, count));
        const std::size_t done = outcomes.size();
        const auto run_alone = [&](std::size_t k) { alone.insert(without_parameter(names[i + k])); };
        if (done < count && (is_stopped || !is_clean)) run_alone(done);
        if (done == count && !is_clean) {  // which of them leaks is not known
          for (std::size_t k = 0; k < count; ++k) run_alone(k);
        }
        if (!is_clean || done == 0) {
          --i;  // again, without what runs alone
          continue;
        }
        together.assign(outcomes.begin(), outcomes.end());
      }
    }
    Outcome found{};
    if (!together.empty()) {
      found = together.front();
      together.pop_front();
    } else {
      // Of the instances of a case, which run the same code, the last has most ranks.
      const bool last_instance = i + 1 == names.size() || without_parameter(names[i + 1]) != without_parameter(name);
      const auto start = Clock::now();
      found.status = run_case(name, last_instance);
      found.milliseconds = milliseconds_since(start);
    }
    const auto [status, milliseconds] = found;
    // Programs that run beside this one append to the same file: a line is written at once.
    if (times.is_open()) times << milliseconds << '\t' << name << std::endl;
    const char* outcome = "     OK";
    if (WIFEXITED(status) && WEXITSTATUS(status) == kSkipped) {
      outcome = " SKIPPED";
      ++skipped;
    } else if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      outcome = "  FAILED";
      failed.push_back(name);
      if (WIFSIGNALED(status)) {
        std::printf("%s: ended by signal %d (%s)\n", name.c_str(), WTERMSIG(status),
                    WTERMSIG(status) == SIGALRM ? "time limit" : ::strsignal(WTERMSIG(status)));
      }
    }
    std::printf("[ %s ] %s (%ld ms)\n", outcome, name.c_str(), milliseconds);
    if (!failed.empty() && GTEST_FLAG_GET(fail_fast)) break;
  }
  for (const std::string& name : failed) std::printf("[  FAILED  ] %s\n", name.c_str());
  std::printf("[  %s  ] %zu tests, %zu failed, %zu skipped.\n", failed.empty() ? "PASSED" : "FAILED", names.size(),
              failed.size(), skipped);
  return failed.empty() ? 0 : 1;
}

}  // namespace

// LeakSanitizer calls this, where it is there, before it searches.
extern "C" int __lsan_is_turned_off() { return leaks_are_searched ? 0 : 1; }  // NOLINT: a name of the sanitizer's

int main(int argc, char** argv) {
  bool in_process = false;
  for (int i = 1; i < argc; ++i) in_process = in_process || std::strcmp(argv[i], "--in-process") == 0;
  ::testing::InitGoogleMock(&argc, argv);
  if (in_process || GTEST_FLAG_GET(list_tests)) return RUN_ALL_TESTS();
  const std::vector<std::string> names = selected_cases(shard_of_environment());
  ::testing::TestEventListeners& listeners = ::testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new FailurePrinter);
  return run_each_case_in_a_process(names);
}
