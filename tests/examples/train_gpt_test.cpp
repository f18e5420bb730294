// Runs examples/train_gpt.cpp with commands such as those in its first lines.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "cli/command.h"
#include "support/chaos.h"
#include "support/paths.h"
#include "support/temporary_directory.h"

namespace tessera::testing {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

Outcome train(int ranks, const std::filesystem::path& directory, const std::vector<std::string>& flags) {
  std::vector<std::string> words = {"run",         "-n", std::to_string(ranks),
                                    "--no-prefix", "--", tessera::testing::programs_dir() + "/train_gpt"};
  for (const char* small : {"--layers", "2", "--width", "16", "--context", "16", "--batch", "7", "--save-every", "3"}) {
    words.emplace_back(small);
  }
  // One of the texts that it reads by default.
  words.insert(words.end(), {"/usr/share/common-licenses/Apache-2.0", "--directory", directory.string()});
  words.insert(words.end(), flags.begin(), flags.end());
  return run_tessera(words);
}

// Returns the loss of each step: 4.25 for "1,4.25,2".
std::vector<double> losses_of(const std::filesystem::path& directory) {
  std::ifstream in(directory / "loss.csv");
  std::string line;
  std::getline(in, line);
  std::vector<double> losses;
  while (std::getline(in, line)) losses.push_back(std::stod(line.substr(line.find(',') + 1)));
  return losses;
}

TEST(TrainGptTest, GoesOnWhereItWasOnAnotherNumberOfRanks) {
  const TemporaryDirectory directory;
  const auto alone = directory / "alone", parts = directory / "parts";
  ASSERT_EQ(train(1, alone, {"--steps", "8"}).status, 0);
  ASSERT_EQ(train(3, parts, {"--steps", "4"}).status, 0);
  std::filesystem::remove_all(parts / "step-4");  // as if the run had been killed before this save
  const Outcome rest = train(2, parts, {"--steps", "8", "--accumulate", "2", "--sample", "20"});
  ASSERT_EQ(rest.status, 0) << rest.err;
  EXPECT_THAT(rest.out, HasSubstr("resumed from step 3\nstep    4  loss "));

  const std::vector<double> expected = losses_of(alone), found = losses_of(parts);
  ASSERT_EQ(expected.size(), 8u);
  ASSERT_EQ(found.size(), 8u);
  for (std::size_t i = 0; i < 8; ++i) EXPECT_NEAR(found[i], expected[i], 1e-4) << "step " << i + 1;
  EXPECT_LT(expected.back(), expected.front() - 0.2);
  EXPECT_EQ(run_tessera({"verify", (parts / "step-8").string()}).status, 0);
}

TEST(TrainGptTest, EveryStrategyLearnsTheSame) {
  const TemporaryDirectory directory;
  ASSERT_EQ(train(1, directory / "alone", {"--steps", "2"}).status, 0);
  const std::vector<double> expected = losses_of(directory / "alone");
  SampleIfSanitized sample(4);
  for (const char* strategy : {"full_shard", "shard_grad_op", "no_shard", "hybrid_shard_zero2", "hybrid_shard"}) {
    if (!sample.takes_next()) continue;
    SCOPED_TRACE(strategy);
    const Outcome outcome = train(4, directory / strategy, {"--steps", "2", "--strategy", strategy});
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const std::vector<double> found = losses_of(directory / strategy);
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-4) << "step " << i + 1;
  }
}

TEST(TrainGptTest, DrawsTheLoss) {
  const TemporaryDirectory directory;
  const auto plot = directory / "loss.svg";
  ASSERT_EQ(train(2, directory / "checkpoints", {"--steps", "3", "--plot", plot.string()}).status, 0);
  ASSERT_EQ(train(1, directory / "checkpoints", {"--steps", "5", "--plot", plot.string()}).status, 0);
  std::ifstream in(plot);
  const std::string drawn((std::istreambuf_iterator<char>(in)), {});
  EXPECT_THAT(drawn, StartsWith("<svg "));
  EXPECT_THAT(drawn, HasSubstr(">2 ranks, steps 1 to 3</text>"));
  EXPECT_THAT(drawn, HasSubstr(">1 rank, steps 4 to 5</text>"));
  EXPECT_THAT(drawn, EndsWith("</svg>\n"));
}

TEST(TrainGptTest, ACheckpointOfAnotherModelIsRefused) {
  const TemporaryDirectory directory;
  ASSERT_EQ(train(1, directory / "checkpoints", {"--steps", "1"}).status, 0);
  const Outcome other = train(1, directory / "checkpoints", {"--steps", "2", "--heads", "2"});
  EXPECT_EQ(other.status, 1);
  EXPECT_THAT(other.err,
              HasSubstr("'config' of the checkpoint is {'context': 16, 'layers': 2, 'heads': 4, 'width': 16}"));
}

}  // namespace
}  // namespace tessera::testing
