// Conversions to torch_checkpointing: the state stays the same, and each rank has its part.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "support/error_matchers.h"
#include "support/golden.h"
#include "support/temporary_directory.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/diff.h"
#include "tessera/checkpoint/verify.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::shared_ptr<const Checkpoint> converted_and_verified(const fs::path& from, const fs::path& to, SourceKind kind) {
  ConvertOptions options;
  options.to = kind;
  convert(Checkpoint::open(from), to, options);
  for (const Problem& problem : verify(to).problems) ADD_FAILURE() << problem.what;
  return Checkpoint::open(to);
}

void expect_no_difference(const fs::path& a, const fs::path& b) {
  for (const Difference& difference : diff(Checkpoint::open(a), Checkpoint::open(b)).differences) {
    ADD_FAILURE() << to_string(difference);
  }
}

class ConvertToTorchCheckpointingTest : public ::testing::TestWithParam<std::string> {
 protected:
  const testing::TemporaryDirectory directory_;
};

// A state whose names are no paths becomes one item.
TEST_P(ConvertToTorchCheckpointingTest, ThereAndBackNothingChanges) {
  const testing::Golden golden = testing::read_golden(GetParam());
  const auto result = converted_and_verified(golden.checkpoint, directory_ / "a", SourceKind::torch_checkpointing);
  const bool is_one_item = !result->find_tensor(golden.tensors.begin()->first);
  EXPECT_EQ(result->kind(), SourceKind::torch_checkpointing);
  EXPECT_THAT(result->warnings(), IsEmpty());
  std::map<std::string, testing::GoldenTensor> expected;
  for (const auto& [name, tensor] : golden.tensors) expected[(is_one_item ? "model." : "") + name] = tensor;
  EXPECT_EQ(testing::read_tensors(result), expected);
  if (!is_one_item) expect_no_difference(golden.checkpoint, directory_ / "a");
  converted_and_verified(directory_ / "a", directory_ / "b", SourceKind::dcp);
  expect_no_difference(directory_ / "a", directory_ / "b");
  converted_and_verified(directory_ / "b", directory_ / "c", SourceKind::torch_checkpointing);
  expect_no_difference(directory_ / "a", directory_ / "c");
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, ConvertToTorchCheckpointingTest, ::testing::ValuesIn(testing::golden_names()),
                         [](const auto& test) { return testing::test_name(test.param); });

class TorchCheckpointingOutputTest : public ::testing::Test {
 protected:
  const testing::TemporaryDirectory directory_;
};

TEST_F(TorchCheckpointingOutputTest, EachRankHasItsShardsAndAllElse) {
  const auto result = converted_and_verified(testing::read_golden("2.14-tc-fsdp").checkpoint, directory_ / "a",
                                             SourceKind::torch_checkpointing);
  for (const std::string name : {".tessera.json", "metadata.pkl", "model_0.pt", "model_2.pt", "optimizer_1.pt",
                                 "step_0.pt", "step_1.pt", "step_2.pt"}) {
    EXPECT_TRUE(fs::exists(directory_ / "a" / name)) << name;
  }
  EXPECT_TRUE(result->has_sidecar());
  EXPECT_EQ(result->version(), "torch_checkpointing 2.0, 3 ranks");
  const TensorInfo& weight = result->tensors()[result->find_tensor("model.layers.1.weight").value()];
  ASSERT_EQ(weight.chunks.size(), 3u);
  EXPECT_EQ(Box(weight.chunks[1]), Box({0, 2}, {4, 2}));
  std::size_t copies = 0;
  for (const StoredCopy& copy : result->copies()) copies += static_cast<std::size_t>(copy.name == "model.norm");
  EXPECT_EQ(copies, 2u);
}

TEST_F(TorchCheckpointingOutputTest, AStateThatIsNotShardedHasOneRank) {
  converted_and_verified(testing::read_golden("2.14-tc-fsdp").checkpoint, directory_ / "a.pt", SourceKind::torch);
  const auto result = converted_and_verified(directory_ / "a.pt", directory_ / "b", SourceKind::torch_checkpointing);
  EXPECT_EQ(result->version(), "torch_checkpointing 2.0, 1 rank");
  EXPECT_THAT(result->copies(), IsEmpty());
}

TEST_F(TorchCheckpointingOutputTest, NamesThatAreNoItemsAreOneItemAndAWarning) {
  std::vector<std::string> warnings;
  ConvertOptions options;
  options.to = SourceKind::torch_checkpointing;
  options.warn = [&](const std::string& text) { warnings.push_back(text); };
  const auto source = Checkpoint::open(testing::read_golden("2.14-hf").checkpoint);
  convert(source, directory_ / "a", options);
  EXPECT_THAT(warnings, ::testing::Contains(HasSubstr("the state becomes the item 'model'")));
  options.max_shard_bytes = 100;
  EXPECT_ERROR(convert(source, directory_ / "b", options), ErrorCode::invalid_argument,
               "one file for each item and rank");
}

}  // namespace
}  // namespace tessera::checkpoint
