// `tessera run`: ranks as processes on this machine.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <thread>

#include "cli/command.h"
#include "support/paths.h"
#include "support/temporary_directory.h"

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Outcome run(int ranks, const std::string& script, std::vector<std::string> flags = {},
            const Conditions& conditions = {}) {
  std::vector<std::string> arguments = {"run", "-n", std::to_string(ranks)};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  arguments.insert(arguments.end(), {"--", "sh", "-c", script});
  return run_tessera(arguments, conditions);
}

TEST(RunTest, EveryRankKnowsWhoItIs) {
  const Outcome outcome = run(3, "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT",
                              {"--master-addr", "localhost", "--master-port", "4321"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.err, "");
  for (const std::string rank : {"0", "1", "2"}) {
    EXPECT_THAT(outcome.out, HasSubstr("[" + rank + "] " + rank + " " + rank + " 3 3 localhost:4321\n"));
  }
}

TEST(RunTest, RanksThatAreSetAlreadyAreReplaced) {
  Conditions conditions;
  conditions.environment = {{"RANK", "17"}, {"OMP_NUM_THREADS", "5"}};
  EXPECT_EQ(run(1, "echo $RANK $OMP_NUM_THREADS", {}, conditions).out, "[0] 0 5\n");
}

TEST(RunTest, RanksBelowTorchrunDoNotUseItsStore) {
  Conditions conditions;
  conditions.environment = {{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RUN_ID", "7"}};
  EXPECT_EQ(run(1, "env | grep -c TORCHELASTIC", {"--no-prefix"}, conditions).out, "0\n");
}

TEST(RunTest, ThePortIsFreeAndTheSameForAll) {
  const Outcome outcome = run(2, "echo $MASTER_PORT", {"--no-prefix"});
  const std::string first = outcome.out.substr(0, outcome.out.find('\n') + 1);
  EXPECT_EQ(outcome.out, first + first);
  EXPECT_GT(std::stoi(first), 1023);
}

TEST(RunTest, LinesComeWholeWithTheirRankOnTheirStream) {
  const Outcome outcome = run(11, "echo out; echo err >&2; printf end");
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("[ 9] out\n"), HasSubstr("[ 9] end\n"), HasSubstr("[10] end\n")));
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("[ 0] err\n"), HasSubstr("[10] err\n"), Not(HasSubstr("out"))));
}

TEST(RunTest, ALineOfAnyLengthArrives) {
  const Outcome outcome = run(1, "head -c 1000000 /dev/zero | tr '\\0' x; echo", {"--no-prefix"});
  EXPECT_EQ(outcome.out, std::string(1'000'000, 'x') + "\n");
}

TEST(RunTest, TheFirstThatFailsEndsTheOthersAndGivesTheStatus) {
  const Outcome outcome =
      run(3, "trap 'echo told; exit 5' TERM; if [ $RANK = 1 ]; then sleep 1; exit 7; fi; while :; do sleep 0.05; done");
  EXPECT_EQ(outcome.status, 7);
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("[0] told\n"), HasSubstr("[2] told\n")));
  EXPECT_THAT(outcome.err, HasSubstr("tessera: run: rank 1 exited with status 7; the other ranks were terminated\n"));
}

TEST(RunTest, ARankThatASignalEnded) {
  const Outcome outcome = run(2, "if [ $RANK = 0 ]; then kill -SEGV $$; fi; sleep 60");
  EXPECT_EQ(outcome.status, 128 + SIGSEGV);
  EXPECT_THAT(outcome.err, HasSubstr("tessera: run: rank 0 was ended by signal 11 (Segmentation fault)"));
}

TEST(RunTest, WhoDoesNotListenIsKilled) {
  const auto begin = std::chrono::steady_clock::now();
  const Outcome outcome =
      run(2, "trap '' TERM; if [ $RANK = 0 ]; then sleep 0.2; exit 3; fi; while :; do sleep 1; done");
  EXPECT_EQ(outcome.status, 3);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
}

TEST(RunTest, WhatARankLeavesBehindIsEnded) {
  const Outcome outcome = run(2, "sleep 1000 & echo started");
  EXPECT_EQ(outcome.status, 0);
}

TEST(RunTest, SignalsArePassedOn) {
  Running running(
      {"run", "-n", "2", "--", "sh", "-c", "trap 'echo usr; exit 0' USR1; echo ready; while :; do sleep 0.05; done"});
  running.wait_for_output();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  running.signal(SIGUSR1);
  const Outcome outcome = running.finish();
  EXPECT_EQ(outcome.status, 0);
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("[0] usr\n"), HasSubstr("[1] usr\n")));
}

TEST(RunTest, ASecondInterruptKills) {
  Running running({"run", "-n", "2", "--", "sh", "-c", "trap '' INT; echo ready; while :; do sleep 0.05; done"});
  running.wait_for_output();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  running.signal(SIGINT);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  running.signal(SIGINT);
  EXPECT_EQ(running.finish().status, 128 + SIGKILL);
}

// Calls `attempt` until it returns true, for at most 30 seconds.
template <typename Attempt>
bool becomes_true(const Attempt& attempt) {
  for (int i = 0; i < 3000; ++i) {
    if (attempt()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

// Rank 0 writes a line that its pipes have no room for. When it is terminated, it makes the file "told". Rank 1 fails
// when there is a file "fail".
class UnreadOutputTest : public ::testing::Test {
 protected:
  Running start(const std::string& ranks, const std::string& trap) const {
    return Running({"run", "-n", ranks, "--", "sh", "-c",
                    "cd " + folder_.path().string() +
                        "; if [ $RANK = 1 ]; then while [ ! -e fail ]; do sleep 0.01; done; exit 7; fi; " + trap +
                        "; head -c 200000 /dev/zero | tr '\\0' x & while :; do sleep 0.05; done"});
  }
  bool was_told() const {
    return becomes_true([&] { return std::filesystem::exists(folder_ / "told"); });
  }
  const TemporaryDirectory folder_;
};

TEST_F(UnreadOutputTest, DoesNotKeepSignalsFromRanks) {
  Running running = start("1", "trap 'touch told; exit 3' TERM");
  running.wait_for_output();
  running.signal(SIGTERM);
  EXPECT_TRUE(was_told());
  EXPECT_EQ(running.finish().status, 3);
}

TEST_F(UnreadOutputTest, DoesNotHideThatARankFails) {
  Running running = start("2", "trap 'touch told; exit 3' TERM");
  running.wait_for_output();
  write_text(folder_ / "fail", "");
  EXPECT_TRUE(was_told());
  EXPECT_EQ(running.finish().status, 7);
}

TEST_F(UnreadOutputTest, IsGivenUpAfterAThirdInterrupt) {
  Running running = start("1", "trap '' INT");
  running.wait_for_output();
  EXPECT_TRUE(becomes_true([&] {
    running.signal(SIGINT);
    return running.has_ended();
  }));
  running.signal(SIGKILL);
  EXPECT_EQ(running.finish().status, 128 + SIGINT);
}

TEST(RunTest, OnlyRankZeroReadsStandardInput) {
  const Outcome outcome =
      run_program({"sh", "-c", std::string("echo line | ") + tessera::testing::command_path() + " run -n 2 -- cat"});
  EXPECT_EQ(outcome.out, "[0] line\n");
}

TEST(RunTest, FlagsOfTheProgramAreItsOwn) {
  EXPECT_EQ(run_tessera({"run", "-n", "1", "--", "echo", "--help", "-n", "4"}).out, "[0] --help -n 4\n");
}

TEST(RunTest, ArgumentsAfterTheProgramAreItsOwn) {
  const std::vector<std::string> own = {"run", "x", "--", "-n", "4", "--help", "++", "run", ""};
  for (const bool has_dashes : {false, true}) {
    std::vector<std::string> arguments = {"run", "-n", "1", "printf", "<%s>"};
    if (has_dashes) arguments.insert(arguments.begin() + 3, "--");
    arguments.insert(arguments.end(), own.begin(), own.end());
    EXPECT_EQ(run_tessera(arguments).out, "[0] <run><x><--><-n><4><--help><++><run><>\n");
  }
}

TEST(RunTest, BracketsOfArgumentsAreKept) {
  EXPECT_EQ(run_tessera({"run", "-n", "1", "--", "echo", "[a,b]", "--", "[c]"}).out, "[0] [a,b] -- [c]\n");
}

TEST(RunTest, WhatCannotBeRun) {
  const Outcome missing = run_tessera({"run", "-n", "2", "--", "no-such-program"});
  EXPECT_EQ(missing.status, 3);
  EXPECT_EQ(missing.err, "tessera: run no-such-program: No such file or directory\n");
  const TemporaryDirectory folder;
  write_text(folder / "plain", "no program");
  const Outcome plain = run_tessera({"run", "-n", "2", "--", folder / "plain"});
  EXPECT_EQ(plain.status, 3);
  EXPECT_TRUE(is_one_error_line(plain.err)) << plain.err;
}

TEST(RunTest, Usage) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"run"},
                                             {"run", "-n", "2"},
                                             {"run", "-n", "0", "--", "true"},
                                             {"run", "-n", "x", "--", "true"},
                                             {"run", "--", "true"},
                                             {"run", "-n", "1", "--frobnicate", "--", "true"},
                                             {"run", "-n", "1", "--master-port", "70000", "--", "true"}}) {
    const Outcome outcome = run_tessera(arguments);
    EXPECT_EQ(outcome.status, 2);
    EXPECT_TRUE(is_one_error_line(outcome.err)) << outcome.err;
    EXPECT_EQ(outcome.out, "");
  }
}

}  // namespace
}  // namespace tessera::testing
