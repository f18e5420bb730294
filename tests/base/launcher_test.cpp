#include "tessera/base/launcher.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <string_view>
#include <thread>

#include "support/temporary_directory.h"

namespace tessera {
namespace {

// Returns the output of one rank that runs `script`. It takes `delay` to deliver each line.
std::string output_of(const std::string& script, std::chrono::milliseconds grace, std::chrono::milliseconds delay) {
  std::string output;
  LaunchOptions options;
  options.command = {"sh", "-c", script};
  options.grace = grace;
  options.output = [&](int, bool, std::string_view line) {
    std::this_thread::sleep_for(delay);
    output += line;
  };
  EXPECT_EQ(launch_ranks(options).status, 0);
  return output;
}

// When the grace ends, the pipe is still full.
TEST(LauncherTest, ASlowReaderGetsAllOutput) {
  constexpr int kLines = 15;
  const std::string output = output_of("for i in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14; do printf '%04000d\\n' $i; done",
                                       std::chrono::milliseconds(1), std::chrono::milliseconds(5));
  EXPECT_EQ(output.size(), kLines * 4001u);
}

TEST(LauncherTest, ALineWithoutItsEndIsDeliveredThoughAnotherProcessHoldsThePipe) {
  EXPECT_EQ(
      output_of("setsid sleep 2 & sleep 0.1; printf end", std::chrono::milliseconds(50), std::chrono::milliseconds(0)),
      "end");
}

// Rank 0 fails when rank 1 is ready, which takes a while to end then.
TEST(LauncherTest, AGraceMayBeAsLongAsItsTypeAllows) {
  const testing::TemporaryDirectory directory;
  const std::string is_ready = (directory.path() / "ready").string();
  std::string output;
  LaunchOptions options;
  options.ranks = 2;
  options.grace = std::chrono::milliseconds::max();
  options.command = {"sh", "-c",
                     "if [ $RANK = 0 ]; then while [ ! -e " + is_ready +
                         " ]; do sleep 0.01; done; exit 3; fi; trap 'sleep 0.2; echo end; exit 0' TERM; touch " +
                         is_ready + "; while :; do sleep 0.01; done"};
  options.output = [&](int, bool, std::string_view line) { output += line; };
  EXPECT_EQ(launch_ranks(options).status, 3);
  EXPECT_TRUE(output.ends_with("end\n")) << output;  // shells also report the end of `sleep`
}

}  // namespace
}  // namespace tessera
