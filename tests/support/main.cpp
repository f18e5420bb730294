// The main function of every test program. Each case runs in a process of its own, forked before the program has
// threads: cases share no state, ranks may be forked from them, and a case that crashes or hangs fails alone. LibTorch
// is loaded once for a program, not once for each case.
//
//   --in-process     runs all cases in this process, for a debugger
//
// The other flags are GoogleTest's. With TESSERA_TEST_TIMES=FILE the duration of each case is appended to FILE.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

// Defined in programs that a sanitizer is linked to.
extern "C" __attribute__((weak)) void __lsan_do_leak_check();  // NOLINT: a name of the sanitizer's

namespace {

using Clock = std::chrono::steady_clock;
constexpr unsigned kCaseSeconds = 600;

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

// Returns the cases that the filter and the shard select. Listing them makes GoogleTest apply both.
std::vector<std::string> selected_cases() {
  ::testing::internal::CaptureStdout();
  GTEST_FLAG_SET(list_tests, true);
  const int listed = RUN_ALL_TESTS();
  GTEST_FLAG_SET(list_tests, false);
  ::testing::internal::GetCapturedStdout();
  if (listed != 0) std::exit(listed);
  ::unsetenv("GTEST_TOTAL_SHARDS");
  ::unsetenv("GTEST_SHARD_INDEX");
  const auto* unit_test = ::testing::UnitTest::GetInstance();
  std::vector<std::string> names;
  for (int i = 0; i < unit_test->total_test_suite_count(); ++i) {
    const ::testing::TestSuite* suite = unit_test->GetTestSuite(i);
    for (int k = 0; k < suite->total_test_count(); ++k) {
      const ::testing::TestInfo* info = suite->GetTestInfo(k);
      if (info->should_run()) names.push_back(std::string(suite->name()) + "." + info->name());
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

// Runs the case `name` and returns the status of waitpid().
int run_case(const std::string& name, bool search_leaks) {
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid < 0) {
    std::perror("fork");
    std::exit(1);
  }
  if (pid == 0) {
    ::alarm(kCaseSeconds);
    leaks_are_searched = search_leaks;
    GTEST_FLAG_SET(filter, name);
    const int failed = RUN_ALL_TESTS();
    const bool skipped = ::testing::UnitTest::GetInstance()->skipped_test_count() != 0;
    end_case(failed != 0 ? 1 : skipped ? 77 : 0);  // 77: CTest's and automake's status of a skipped test
  }
  int status = 0;
  while (::waitpid(pid, &status, 0) != pid) {
  }
  return status;
}

int run_each_case_in_a_process(const std::vector<std::string>& names) {
  const char* times_file = std::getenv("TESSERA_TEST_TIMES");
  std::ofstream times;
  if (times_file != nullptr) times.open(times_file, std::ios::app);
  std::vector<std::string> failed;
  std::size_t skipped = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::string& name = names[i];
    // Of the instances of a case, which run the same code, the last has most ranks.
    const bool last_instance = i + 1 == names.size() || without_parameter(names[i + 1]) != without_parameter(name);
    const auto start = Clock::now();
    const int status = run_case(name, last_instance);
    const long milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count();
    if (times.is_open()) times << milliseconds << '\t' << name << '\n';
    const char* outcome = "     OK";
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
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
  const std::vector<std::string> names = selected_cases();
  ::testing::TestEventListeners& listeners = ::testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new FailurePrinter);
  return run_each_case_in_a_process(names);
}
