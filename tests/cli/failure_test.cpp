// Failures of the system: output that cannot be written, a full disk, signals during an operation.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <thread>

#include "cli/command.h"
#include "support/paths.h"
#include "support/temporary_directory.h"
#include "tessera/base/file.h"
#include "tessera/format/torch_archive.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::StartsWith;

const std::vector<std::vector<std::string>>& printing_commands() {
  static const std::vector<std::vector<std::string>> commands = {
      {"--version"},
      {"--help"},
      {"convert", "--help"},
      {"inspect", golden("2.14-optim")},
      {"inspect", golden("2.14-optim"), "--json"},
      {"verify", golden("2.14-optim")},
      {"diff", golden("2.14-optim"), golden("2.14-optim")},
      {"map", golden("2.14-optim"), "-o", "-"},
  };
  return commands;
}

TEST(OutputTest, FullDeviceIsAFailure) {
  Conditions conditions;
  conditions.stdout_file = "/dev/full";
  for (const auto& command : printing_commands()) {
    const Outcome outcome = run_tessera(command, conditions);
    EXPECT_EQ(outcome.status, 3) << command[0];
    EXPECT_EQ(outcome.err, "tessera: write to standard output: No space left on device\n") << command[0];
  }
}

TEST(OutputTest, ClosedPipeIsAQuietFailure) {
  Conditions conditions;
  conditions.stdout_closed_pipe = true;
  for (const auto& command : printing_commands()) {
    const Outcome outcome = run_tessera(command, conditions);
    EXPECT_EQ(outcome.status, 3) << command[0];
    EXPECT_EQ(outcome.err, "") << command[0];
  }
}

TEST(OutputTest, InterruptedWhileNobodyReads) {
  for (const bool non_blocking : {false, true}) {
    Conditions conditions;
    conditions.stdout_non_blocking = non_blocking;
    // The page does not fit into the pipe.
    Running running({"map", golden("2.14-dtensor"), "-o", "-"}, conditions);
    running.wait_for_output();
    running.signal(SIGINT);
    const Outcome outcome = running.finish();
    EXPECT_EQ(outcome.status, 3);
    EXPECT_EQ(outcome.err, "tessera: interrupted\n");
  }
}

TEST(OutputTest, InterruptedWhileNobodyReadsAnError) {
  Conditions conditions;
  conditions.stderr_small = true;
  Running running({"inspect", std::string(9000, 'x')}, conditions);
  running.wait_for_errors();
  running.signal(SIGTERM);
  EXPECT_TRUE(running.wait_until_it_has_ended());
  const Outcome outcome = running.finish();
  EXPECT_EQ(outcome.status, 3);
  EXPECT_THAT(outcome.err, StartsWith("tessera: "));
}

// One signal is enough for all of them.
TEST(OutputTest, InterruptedWhileNobodyReadsManyWarnings) {
  const TemporaryDirectory folder;
  std::string pickle = "\x80\x02}(";
  for (int i = 100; i < 300; ++i) pickle += "U\x03" + std::to_string(i) + "cmine\nThing\n)R";
  pickle += "u.";
  const ByteView bytes = as_bytes(pickle);
  const torch_archive::ArchiveLayout layout("archive", Bytes(bytes.begin(), bytes.end()), {});
  write_new_file(folder / "in.pt", layout.trailer({}));
  Conditions conditions;
  conditions.stderr_small = true;
  Running running({"convert", folder / "in.pt", folder / "out.safetensors", "--all-warnings"}, conditions);
  running.wait_for_errors();
  running.signal(SIGINT);
  EXPECT_TRUE(running.wait_until_it_has_ended());
  const Outcome outcome = running.finish();
  EXPECT_EQ(outcome.status, 0) << "the conversion was over";
  EXPECT_THAT(outcome.out, StartsWith("wrote "));
  EXPECT_THAT(outcome.err, StartsWith("tessera: warning: object '100' cannot be stored in safetensors"));
}

// Another program that shares the pipe or the terminal may have made it so.
TEST(OutputTest, ANonBlockingPipeGetsAllOutput) {
  Conditions conditions;
  conditions.stdout_non_blocking = true;
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"map", golden("2.14-dtensor"), "-o", "-"},
                                             {"inspect", golden("2.14-dtensor"), "--json"},
                                             {"run", "-n", "1", "--", "seq", "20000"}}) {
    const Outcome outcome = run_tessera(arguments, conditions), expected = run_tessera(arguments);
    EXPECT_EQ(outcome.status, 0) << arguments[0];
    EXPECT_EQ(outcome.err, "") << arguments[0];
    EXPECT_EQ(outcome.out, expected.out) << arguments[0];
    EXPECT_GT(outcome.out.size(), 4096u) << arguments[0];
  }
}

TEST(OutputTest, ClosedDescriptorsAreNoHindranceToFiles) {
  for (const std::vector<int>& closed : std::vector<std::vector<int>>{{0}, {1}, {2}, {0, 1, 2}}) {
    const TemporaryDirectory folder;
    Conditions conditions;
    conditions.closed = closed;
    const bool can_say = closed == std::vector{0} || closed == std::vector{2};
    const Outcome outcome = run_tessera({"convert", golden("2.14-dtensor"), folder / "a.pt"}, conditions);
    EXPECT_EQ(outcome.status, can_say ? 0 : 3);
    EXPECT_EQ(outcome.err, closed == std::vector{1} ? "tessera: write to standard output: Bad file descriptor\n" : "");
    EXPECT_EQ(run_tessera({"diff", golden("2.14-dtensor"), folder / "a.pt"}).status, 0);
  }
}

// Otherwise a file could get the number of the descriptor and receive the output.
TEST(OutputTest, ClosedDescriptorsAreTaken) {
  for (const int closed : {0, 1}) {
    Conditions conditions;
    conditions.closed = {closed};
    const Outcome outcome = run_tessera({"inspect", "/proc/self/fd/" + std::to_string(closed)}, conditions);
    EXPECT_EQ(outcome.status, 3);
    EXPECT_THAT(outcome.err, HasSubstr("found a special file"));
  }
}

void expect_interrupted(Running& running) {
  const Outcome outcome = running.finish();
  EXPECT_EQ(outcome.status, 3);
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(outcome.err, "tessera: interrupted\n");
}

// Waits for another file beside the source, and returns its name; empty if none appears.
std::string wait_for_partial(const fs::path& folder) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (std::chrono::steady_clock::now() < deadline) {
    for (const std::string& name : names_in(folder)) {
      if (name != "big.safetensors") return name;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return "";
}

class InterruptionTest : public ::testing::TestWithParam<int> {
 protected:
  InterruptionTest() { write_sparse_safetensors(folder_ / "big.safetensors", 96, 16 << 20); }

  const TemporaryDirectory folder_;
};

TEST_P(InterruptionTest, InTheMiddleOfWritingLeavesNothing) {
  for (const std::vector<std::string>& rest :
       std::vector<std::vector<std::string>>{{"convert", "out", "--to", "dcp"},
                                             {"convert", "out.pt"},
                                             {"convert", "out.safetensors"},
                                             {"reshard", "out", "--ranks", "3"}}) {
    std::vector<std::string> arguments = {rest[0], folder_ / "big.safetensors", folder_ / rest[1]};
    arguments.insert(arguments.end(), rest.begin() + 2, rest.end());
    Running running(arguments);
    EXPECT_THAT(wait_for_partial(folder_.path()), MatchesRegex("\\.out.*\\.tessera-.*\\.partial"));
    running.signal(GetParam());
    expect_interrupted(running);
    EXPECT_THAT(names_in(folder_.path()), ElementsAre("big.safetensors")) << rest[0] << " " << rest[1];
  }
}

TEST_P(InterruptionTest, InTheMiddleOfReadingIsNoAnswer) {
  write_sparse_safetensors(folder_ / "same.safetensors", 96, 16 << 20);
  write_text(folder_ / "big.safetensors.tessera.json", R"({"version": 1, "files": {"big.safetensors": {"bytes": )" +
                                                           std::to_string(fs::file_size(folder_ / "big.safetensors")) +
                                                           R"(, "crc32": "00000000"}}})");
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"verify", folder_ / "big.safetensors"},
                                             {"verify", folder_ / "big.safetensors", "--json"},
                                             {"diff", folder_ / "big.safetensors", folder_ / "same.safetensors"}}) {
    Running running(arguments);
    EXPECT_TRUE(running.wait_until_it_has_read(40 << 20));
    running.signal(GetParam());
    expect_interrupted(running);
  }
}

INSTANTIATE_TEST_SUITE_P(Signals, InterruptionTest, ::testing::Values(SIGINT, SIGTERM, SIGHUP),
                         [](const auto& signal) { return std::to_string(signal.param); });

TEST(KillTest, LeftoversAreKnownByTheirNameAndTheNextTryRemovesThem) {
  const TemporaryDirectory folder;
  write_sparse_safetensors(folder / "big.safetensors", 96, 16 << 20);
  for (const std::string name : {"ck", "a.pt", "b.safetensors"}) {
    std::vector<std::string> arguments = {"convert", folder / "big.safetensors", folder / name};
    if (name == "ck") arguments.insert(arguments.end(), {"--to", "dcp"});
    Running running(arguments);
    EXPECT_TRUE(running.wait_until_it_has_read(40 << 20));
    running.signal(SIGKILL);
    EXPECT_EQ(running.finish().status, 128 + SIGKILL);
    EXPECT_THAT(names_in(folder.path()),
                ElementsAre(MatchesRegex("\\." + name + "\\.tessera-[0-9]+-[0-9]+\\.partial"), "big.safetensors"));

    arguments[1] = golden("2.14-optim");
    const Outcome next = run_tessera(arguments);
    EXPECT_EQ(next.status, 0) << next.err;
    EXPECT_EQ(run_tessera({"diff", golden("2.14-optim"), folder / name}).status, 0);
    for (const std::string& left : names_in(folder.path())) EXPECT_THAT(left, Not(HasSubstr("partial")));
    fs::remove_all(folder / name);
    fs::remove(folder / (name + ".tessera.json"));
  }
}

TEST(OutputTest, SecondSignalEndsAtOnce) {
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
  GTEST_SKIP() << "ThreadSanitizer keeps signals back and calls handlers alone, never the default action";
#endif
#endif
  Running running({"map", golden("2.14-dtensor"), "-o", "-"});
  running.wait_for_output();
  running.signal(SIGSTOP);
  running.signal(SIGINT);
  running.signal(SIGTERM);
  running.signal(SIGCONT);
  const Outcome outcome = running.finish();
  EXPECT_EQ(outcome.status, 128 + SIGTERM);
  EXPECT_EQ(outcome.err, "");
}

// Every format, with a limit of 1 KiB for a file.
TEST(DiskTest, FileThatCannotGrowLeavesNothing) {
  const TemporaryDirectory folder;
  Conditions conditions;
  conditions.max_file = 1024;
  for (const std::vector<std::string>& rest : std::vector<std::vector<std::string>>{
           {"a.pt"}, {"a.safetensors"}, {"ck", "--to", "dcp"}, {"dir", "--to", "safetensors"}}) {
    std::vector<std::string> arguments = {"convert", golden("2.14-optim"), folder / rest[0]};
    arguments.insert(arguments.end(), rest.begin() + 1, rest.end());
    const Outcome outcome = run_tessera(arguments, conditions);
    EXPECT_EQ(outcome.status, 3) << rest[0];
    EXPECT_EQ(outcome.out, "");
    EXPECT_TRUE(is_one_error_line(outcome.err)) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("File too large"));
    EXPECT_THAT(names_in(folder.path()), ElementsAre()) << rest[0];
  }
}

TEST(DiskTest, MapLeavesNothingEither) {
  const TemporaryDirectory folder;
  Conditions conditions;
  conditions.max_file = 1024;
  const Outcome outcome = run_tessera({"map", golden("2.14-optim"), "-o", folder / "map.html"}, conditions);
  EXPECT_EQ(outcome.status, 3);
  EXPECT_THAT(outcome.err, HasSubstr("File too large"));
  EXPECT_THAT(names_in(folder.path()), ElementsAre());
}

TEST(DiskTest, FullDiskLeavesNothing) {
  const TemporaryDirectory folder;
  write_sparse_safetensors(folder / "big.safetensors", 4, 1 << 20);
  fs::create_directory(folder / "disk");
  const std::string disk = folder / "disk", mount = "mount -t tmpfs -o size=2m none " + disk;
  if (run_program({"unshare", "-m", "sh", "-c", mount}).status != 0) {
    GTEST_SKIP() << "no right to mount: a full disk was not tested";
  }
  for (const std::string name : {"a.pt", "b.safetensors", "ck --to dcp"}) {
    for (const auto& [option, message] :
         {std::pair("", "found 2.0 MiB free in its file system"), std::pair(" --large", "No space left on device")}) {
      const Outcome outcome = run_program({"unshare", "-m", "sh", "-c",
                                           mount + "; " + tessera::testing::command_path() + " convert " +
                                               (folder / "big.safetensors").string() + " " + disk + "/" + name +
                                               option + "; echo status $?; ls -A " + disk + "; echo end"});
      EXPECT_EQ(outcome.out, "status 3\nend\n") << name;
      EXPECT_TRUE(is_one_error_line(outcome.err)) << outcome.err;
      EXPECT_THAT(outcome.err, HasSubstr(message));
    }
  }
}

}  // namespace
}  // namespace tessera::testing
