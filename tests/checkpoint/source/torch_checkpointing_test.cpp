// Checkpoints of torch_checkpointing: what damage does, and how their directories are recognised. golden_test.cpp reads
// the golden ones.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "support/error_matchers.h"
#include "support/golden.h"
#include "support/temporary_directory.h"
#include "support/torch_file.h"
#include "tessera/base/file.h"
#include "tessera/base/function_ref.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/manage/run_directory.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/format/torch_checkpointing.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
namespace tc = torch_checkpointing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class TorchCheckpointingSourceTest : public ::testing::Test {
 protected:
  // Returns a copy of a golden checkpoint, to damage.
  fs::path copy_of(const std::string& golden) {
    const fs::path copy = directory_ / ("copy-" + std::to_string(copies_++));
    fs::copy(testing::read_golden(golden).checkpoint, copy, fs::copy_options::recursive);
    return copy;
  }

  // Overwrites `metadata.pkl` with what `change` makes of it.
  static void change_metadata(const fs::path& checkpoint, FunctionRef<void(tc::CheckpointMetadata&)> change) {
    tc::CheckpointMetadata metadata = tc::read(File::open_read(checkpoint / "metadata.pkl"));
    change(metadata);
    fs::remove(checkpoint / "metadata.pkl");
    write_new_file(checkpoint / "metadata.pkl", tc::write(metadata));
  }

  // Writes `<item>_<rank>.pt` with one float32 tensor "w".
  static void write_item(const fs::path& folder, const std::string& item, std::int64_t rank, const Bytes& elements) {
    testing::TorchFile file;
    file.storages = {elements};
    const auto count = static_cast<std::int64_t>(elements.size() / 4);
    file.add("w", DType::float32, 0, 0, {count}, {1});
    fs::create_directories(folder);
    write_new_file(folder / tc::to_string({item, rank}), file.bytes());
  }

  // Writes a `metadata.pkl` by which two ranks have all of "w", of 8 bytes, in the item "model".
  static void write_metadata_of_replicas(const fs::path& folder) {
    tc::CheckpointMetadata metadata;
    metadata.ranks = 2;
    auto mesh = std::make_shared<tc::Mesh>();
    mesh->shape = {2};
    mesh->ranks = {0, 1};
    metadata.items.push_back({"model", {{{"w"}, {{DType::float32, {2}, mesh, {Placement::replicate()}}}}}, {}});
    write_new_file(folder / "metadata.pkl", tc::write(metadata));
  }

  testing::TemporaryDirectory directory_;
  int copies_ = 0;
};

TEST_F(TorchCheckpointingSourceTest, FormatAndRanksAreNamed) {
  const auto listed = Checkpoint::open(copy_of("2.14-tc-fsdp"));
  EXPECT_EQ(listed->kind(), SourceKind::torch_checkpointing);
  EXPECT_EQ(listed->version(), "torch_checkpointing 2.0, 3 ranks");
  EXPECT_EQ(Checkpoint::open(copy_of("2.6-tc-local"))->version(), "torch_checkpointing without metadata.pkl, 2 ranks");
}

TEST_F(TorchCheckpointingSourceTest, FilesHaveTheirRanks) {
  const auto checkpoint = Checkpoint::open(copy_of("2.14-tc-files"));
  std::vector<std::string> found;
  for (const SourceFile& file : checkpoint->files())
    found.push_back(file.name + " " + std::to_string(file.rank.value()));
  EXPECT_THAT(found,
              ElementsAre("weights/of_0.safetensors 0", "weights/of_1.safetensors 1", "step_0.pt 0", "step_1.pt 1"));
}

TEST_F(TorchCheckpointingSourceTest, ReplicasAreCopiesOfTheLowestRanks) {
  const auto checkpoint = Checkpoint::open(copy_of("2.14-tc-fsdp"));
  const TensorInfo& norm = checkpoint->tensors()[checkpoint->find_tensor("model.norm").value()];
  ASSERT_EQ(norm.stored.size(), 1u);
  EXPECT_EQ(checkpoint->files()[norm.stored[0].file].name, "model_0.pt");
  std::vector<std::string> copies;
  for (const StoredCopy& copy : checkpoint->copies()) {
    if (copy.name == "model.norm") copies.push_back(checkpoint->files()[copy.stored.file].name);
  }
  EXPECT_THAT(copies, ElementsAre("model_1.pt", "model_2.pt"));
}

TEST_F(TorchCheckpointingSourceTest, ARanksMissingFileIsNamed) {
  const fs::path checkpoint = copy_of("2.14-tc-fsdp");
  fs::remove(checkpoint / "model_1.pt");
  EXPECT_ERROR(Checkpoint::open(checkpoint), ErrorCode::corrupt, "'model_1.pt' is missing",
               "expected it for 'model.layers.0.weight'");
  const VerifyReport report = verify(checkpoint);
  ASSERT_EQ(report.problems.size(), 1u);
  EXPECT_THAT(report.problems[0].what, HasSubstr("model_1.pt"));
}

TEST_F(TorchCheckpointingSourceTest, AMissingFileOfReplicasIsAWarning) {
  const fs::path checkpoint = directory_ / "replicas";
  const Bytes elements(8, 1);
  write_item(checkpoint, "model", 0, elements);
  write_metadata_of_replicas(checkpoint);
  EXPECT_THAT(Checkpoint::open(checkpoint)->warnings(), ElementsAre(HasSubstr("'model_1.pt' is not there")));
}

TEST_F(TorchCheckpointingSourceTest, ATensorWithoutElementsAndWithoutAFileIsStoredNowhere) {
  const fs::path checkpoint = directory_ / "run/step-1";
  fs::create_directories(checkpoint);
  tc::CheckpointMetadata metadata;
  metadata.ranks = 1;
  auto mesh = std::make_shared<tc::Mesh>();
  mesh->shape = {1};
  mesh->ranks = {0};
  metadata.items.push_back({"model", {{{"w"}, {{DType::float32, {0}, mesh, {Placement::replicate()}}}}}, {}});
  write_new_file(checkpoint / "metadata.pkl", tc::write(metadata));
  const auto opened = Checkpoint::open(checkpoint);
  EXPECT_THAT(opened->files(), IsEmpty());
  ASSERT_EQ(opened->tensors().size(), 1u);
  ASSERT_EQ(opened->tensors()[0].stored.size(), 1u);
  EXPECT_EQ(opened->tensors()[0].stored[0].file, StoredRange::kNoFile);
  EXPECT_EQ(verify(checkpoint).tensors, 1u);
  EXPECT_TRUE(list_run(directory_ / "run").entries.at(0).complete);
  ConvertOptions options;
  options.to = SourceKind::safetensors;
  convert(opened, directory_ / "w.safetensors", options);
  EXPECT_EQ(Checkpoint::open(directory_ / "w.safetensors")->tensors()[0].shape, std::vector<std::int64_t>{0});
}

TEST_F(TorchCheckpointingSourceTest, WithoutMetadataAllRanksMustHaveAFile) {
  const fs::path checkpoint = copy_of("2.14-tc-local");
  for (const fs::directory_entry& entry : fs::directory_iterator(copy_of("2.14-tc-local"))) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with("_1.pt")) {
      fs::rename(checkpoint / name, checkpoint / (name.substr(0, name.size() - 4) + "2.pt"));
    }
  }
  EXPECT_ERROR(Checkpoint::open(checkpoint), ErrorCode::corrupt, "no file of rank 1", "_2.pt'");
}

TEST_F(TorchCheckpointingSourceTest, AMissingShardIsAHoleAndTheFileIsNamed) {
  const fs::path checkpoint = copy_of("2.14-tc-local");
  fs::remove(checkpoint / "model_1.pt");
  const auto opened = Checkpoint::open(checkpoint);
  EXPECT_ERROR(opened->check_partition(opened->find_tensor("model.layers.0.weight").value()), ErrorCode::corrupt,
               "model.layers.0.weight", "no chunk holds");
}

TEST_F(TorchCheckpointingSourceTest, AFileOfAnItemThatSomeRanksLackIsAWarning) {
  const fs::path checkpoint = copy_of("2.14-tc-fsdp");
  fs::remove(checkpoint / "step_1.pt");
  EXPECT_THAT(Checkpoint::open(checkpoint)->warnings(), ElementsAre(HasSubstr("'step_1.pt' is not there")));
}

TEST_F(TorchCheckpointingSourceTest, FilesOfAnotherNumberOfRanksAreRefused) {
  const fs::path checkpoint = copy_of("2.14-tc-fsdp");
  fs::copy(checkpoint / "step_0.pt", checkpoint / "step_3.pt");
  EXPECT_ERROR(Checkpoint::open(checkpoint), ErrorCode::corrupt, "step_3.pt", "rank 3", "ranks 0 to 2");
}

TEST_F(TorchCheckpointingSourceTest, MetadataThatNamesAMissingFileIsRefused) {
  const fs::path checkpoint = copy_of("2.14-tc-one");
  change_metadata(checkpoint, [](tc::CheckpointMetadata& metadata) {
    metadata.items[0].files[0] = {"elsewhere.pt", tc::Serialization::torch};
  });
  EXPECT_ERROR(Checkpoint::open(checkpoint), ErrorCode::corrupt, "'elsewhere.pt' is missing");
  change_metadata(checkpoint,
                  [](tc::CheckpointMetadata& metadata) { metadata.items[0].files[0].file = "../model_0.pt"; });
  EXPECT_ERROR(Checkpoint::open(checkpoint), ErrorCode::corrupt, "'../model_0.pt' leaves the checkpoint's directory");
}

TEST_F(TorchCheckpointingSourceTest, TwoRanksInOneFileAreRefused) {
  const fs::path checkpoint = copy_of("2.14-tc-fsdp");
  change_metadata(checkpoint, [](tc::CheckpointMetadata& metadata) {
    metadata.items[0].files[1] = {tc::to_string({metadata.items[0].key, 0}), tc::Serialization::torch};
  });
  EXPECT_ERROR(Checkpoint::open(checkpoint), ErrorCode::corrupt, "two ranks or items are stored in", "_0.pt'");
}

TEST_F(TorchCheckpointingSourceTest, ATensorOfAnotherShapeThanListedIsRefused) {
  const fs::path checkpoint = copy_of("2.14-tc-one");
  change_metadata(checkpoint, [](tc::CheckpointMetadata& metadata) {
    for (tc::TensorEntry& entry : metadata.items[0].entries) {
      if (entry.path == Path{"a"}) entry.groups[0].shape = {6, 2};
    }
  });
  EXPECT_ERROR(Checkpoint::open(checkpoint), ErrorCode::corrupt, "model_0.pt", "'model.a'",
               "found float32 [5, 2], expected float32 [6, 2] as in metadata.pkl");
}

TEST_F(TorchCheckpointingSourceTest, AStridedShardOfManyPartsIsRefusedBeforeTheyAreMade) {
  const fs::path checkpoint = copy_of("2.14-tc-mesh");
  change_metadata(checkpoint, [](tc::CheckpointMetadata& metadata) {
    for (tc::TensorEntry& entry : metadata.items[0].entries) {
      if (entry.path != Path{"strided"}) continue;
      tc::Group& group = entry.groups[0];
      group.shape = {std::int64_t{1} << 30};
      for (Placement& placement : group.placements) placement = Placement::strided_shard(0, 1 << 10);
    }
  });
  EXPECT_ERROR(Checkpoint::open(checkpoint), ErrorCode::corrupt,
               "the parts of strided shards take more than 64.0 MiB, expected at most 64 MiB or 16 times the files");
}

TEST_F(TorchCheckpointingSourceTest, ATensorThatIsListedAndNotThereIsRefused) {
  const fs::path checkpoint = copy_of("2.14-tc-one");
  change_metadata(checkpoint, [](tc::CheckpointMetadata& metadata) {
    tc::TensorEntry more = metadata.items[0].entries[0];
    more.path = {"more"};
    metadata.items[0].entries.push_back(more);
  });
  EXPECT_ERROR(Checkpoint::open(checkpoint), ErrorCode::corrupt, "'model.more' is not in the file of rank 0");
}

TEST_F(TorchCheckpointingSourceTest, FilesThatDisagreeAreRefused) {
  const fs::path checkpoint = copy_of("2.14-tc-local");
  fs::remove(checkpoint / "model_1.pt");
  fs::copy(checkpoint / "optimizer_1.pt", checkpoint / "model_1.pt");
  fs::remove(checkpoint / "optimizer_1.pt");
  fs::copy(copy_of("2.14-tc-local") / "model_0.pt", checkpoint / "optimizer_1.pt");
  // Both files have rank 0's coordinate of another tensor: the names differ, and each tensor has a hole.
  const auto opened = Checkpoint::open(checkpoint);
  EXPECT_ERROR(opened->check_partition(opened->find_tensor("model.layers.0.weight").value()), ErrorCode::corrupt,
               "no chunk holds");
  // A plain tensor in place of a part of a DTensor.
  fs::remove(checkpoint / "model_1.pt");
  testing::TorchFile plain;
  plain.storages = {Bytes(12, 0)};
  plain.add("layers.0.weight", DType::float32, 0, 0, {1, 3}, {3, 1});
  write_new_file(checkpoint / "model_1.pt", plain.bytes());
  EXPECT_ERROR(Checkpoint::open(checkpoint), ErrorCode::corrupt, "model_1.pt", "'model.layers.0.weight'",
               "is a plain tensor, expected a part of the tensor float32 [7, 3]");
}

TEST_F(TorchCheckpointingSourceTest, ValuesThatDifferBetweenRanksHaveANameEach) {
  const fs::path checkpoint = directory_ / "ck";
  write_item(checkpoint, "state", 0, Bytes(8, 1));
  write_item(checkpoint, "state", 1, Bytes(8, 2));
  const auto differing = Checkpoint::open(checkpoint);
  EXPECT_FALSE(differing->find_tensor("state.w"));
  EXPECT_TRUE(differing->find_tensor("state.w.rank_0"));
  EXPECT_TRUE(differing->find_tensor("state.w.rank_1"));
  const fs::path same = directory_ / "same";
  write_item(same, "state", 0, Bytes(8, 1));
  write_item(same, "state", 1, Bytes(8, 1));
  EXPECT_TRUE(Checkpoint::open(same)->find_tensor("state.w"));
  EXPECT_EQ(Checkpoint::open(same)->copies().size(), 1u);
}

TEST_F(TorchCheckpointingSourceTest, ReplicasThatDifferAreAWarning) {
  const fs::path checkpoint = directory_ / "ck";
  write_item(checkpoint, "model", 0, Bytes(8, 1));
  write_item(checkpoint, "model", 1, Bytes(8, 2));
  write_metadata_of_replicas(checkpoint);
  EXPECT_THAT(Checkpoint::open(checkpoint)->warnings(),
              ElementsAre(HasSubstr("1 tensor that ranks share differs between them, for example 'model.w'")));
}

TEST_F(TorchCheckpointingSourceTest, AFlippedBitIsFoundInEveryFile) {
  for (const std::string golden : {"2.14-tc-fsdp", "2.6-tc-local"}) {
    std::vector<std::string> names;
    for (const fs::directory_entry& entry : fs::directory_iterator(testing::read_golden(golden).checkpoint)) {
      names.push_back(entry.path().filename().string());
    }
    for (const std::string& name : names) {
      if (!name.starts_with("model_")) continue;
      const fs::path checkpoint = copy_of(golden);
      const std::uint64_t offset = [&] {
        const auto opened = Checkpoint::open(checkpoint);
        const TensorInfo& tensor = opened->tensors()[opened->find_tensor("model.layers.1.weight").value()];
        for (const StoredRange& stored : tensor.stored) {
          if (opened->files()[stored.file].name == name) return stored.offset_bytes;
        }
        return std::uint64_t{0};
      }();
      ASSERT_NE(offset, 0u) << name;
      Bytes bytes = read_file(checkpoint / name);
      bytes[offset] ^= 4;
      fs::remove(checkpoint / name);
      write_new_file(checkpoint / name, bytes);
      const VerifyReport report = verify(checkpoint);
      ASSERT_EQ(report.problems.size(), 1u) << name;
      EXPECT_EQ(report.problems[0].file, name);
      EXPECT_EQ(report.problems[0].name, "model.layers.1.weight");
    }
  }
}

TEST_F(TorchCheckpointingSourceTest, OtherDirectoriesAreNotTakenForIt) {
  for (const std::string name : {"2.14-dtensor", "2.14-hf", "2.14-replicated", "1.13-sharded"}) {
    EXPECT_NE(Checkpoint::open(testing::read_golden(name).checkpoint)->kind(), SourceKind::torch_checkpointing);
  }
  const fs::path folder = directory_ / "files";
  fs::create_directories(folder);
  for (const std::string name :
       {"model.pt", "epoch_5.pt", "mp_rank_00_model_states.pt", "a b_0.pt", "x_00.pt", "_0.pt"}) {
    write_new_file(folder / name, as_bytes("x"));
  }
  EXPECT_ERROR(Checkpoint::open(folder), ErrorCode::not_found, "no checkpoint in this directory");
}

}  // namespace
}  // namespace tessera::checkpoint
