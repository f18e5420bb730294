#include "tessera/base/launcher.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>

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

}  // namespace
}  // namespace tessera
