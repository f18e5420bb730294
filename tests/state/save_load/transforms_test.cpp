// State dicts whose items are saved through transforms, and hooks around the commit.

#include "tessera/checkpoint/transform.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tensor/sharding_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/async_save.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"
#include "tessera/tensor/dtensor.h"

namespace tessera {
namespace {

using checkpoint::ByteSink;
using checkpoint::StreamTransform;
using checkpoint::TransformPtr;
using checkpoint::TransformRegistry;
using testing::fill_with_indices;
using testing::holds_indices;
using testing::indices;
using testing::specs_of_every_kind;
using testing::TemporaryDirectory;

// Encrypts badly.
class Xor final : public StreamTransform {
 public:
  explicit Xor(std::uint8_t key) : key_(key) {}
  std::string descriptor() const override { return "test.xor"; }
  std::unique_ptr<ByteSink> apply(ByteSink& out) const override { return std::make_unique<Stream>(out, key_); }
  std::unique_ptr<ByteSink> undo(ByteSink& out) const override { return std::make_unique<Stream>(out, key_); }

 private:
  class Stream final : public ByteSink {
   public:
    Stream(ByteSink& out, std::uint8_t key) : out_(out), key_(key) {}
    void write(ByteView bytes) override {
      Bytes changed(bytes.begin(), bytes.end());
      for (std::uint8_t& byte : changed) byte = static_cast<std::uint8_t>(byte ^ key_);
      out_.write(changed);
    }
    void finish() override { out_.finish(); }

   private:
    ByteSink& out_;
    std::uint8_t key_;
  };
  std::uint8_t key_;
};

std::shared_ptr<const TransformRegistry> registry_with_key(std::uint8_t key) {
  auto registry = std::make_shared<TransformRegistry>();
  registry->add("test.xor", [key](const std::string&) -> TransformPtr { return std::make_shared<const Xor>(key); });
  return registry;
}

StateDict transformed_state(const ProcessGroup& group, bool is_filled) {
  StateDict state;
  ShardedTensorOptions options;
  options.dtype = at::kLong;
  for (const auto& spec : specs_of_every_kind({7, 6}, group.size())) {
    const ShardedTensor tensor = ShardedTensor::zeros(spec, {7, 6}, group, options);
    if (is_filled) fill_with_indices(tensor);
    state[std::to_string(state.size())] = tensor;
  }
  const DeviceMesh mesh(group, {group.size()});
  const at::Tensor full = is_filled ? indices({5, 4}) : at::zeros({5, 4}, at::kLong);
  state["rows"] = distribute_tensor(full, mesh, {Placement::shard(0)});
  state["tensor"] = is_filled ? indices({9}) : at::zeros({9}, at::kLong);
  state["blob"] = is_filled ? Value(List{1, "two", 3.0}) : Value();
  return state;
}

// PyTorch: `_extensions` in test_read_write_tensor_and_blob, test_read_write_shard_tensor and
// test_1d_to_1d_reshard_placement_change, and TestDistributedStateDictSaveLoadZStandard.
TEST(SaveTransformTest, TensorsOfEveryKindAndObjectsPassThem) {
  std::vector<std::vector<TransformPtr>> lists = {{std::make_shared<const Xor>(0x5a)}};
  if (checkpoint::has_zstd()) lists.push_back({checkpoint::zstd_transform(), std::make_shared<const Xor>(0x5a)});
  for (const std::vector<TransformPtr>& transforms : lists) {
    for (const int savers : {1, 3}) {
      const TemporaryDirectory directory;
      run_local(savers, [&](const ProcessGroup& group) {
        SaveOptions options;
        options.transforms = transforms;
        save(transformed_state(group, true), directory.path(), group, options);
      });
      for (const int loaders : {1, 3, 4}) {
        run_local(loaders, [&](const ProcessGroup& group) {
          // Other ranks saved other specs under these names, but all with the same elements.
          StateDict state = transformed_state(group, false);
          LoadOptions options;
          options.transforms = registry_with_key(0x5a);
          load(state, directory.path(), group, options);
          for (const auto& [key, value] : state) {
            if (const auto* tensor = value.get_if<ShardedTensor>()) {
              EXPECT_TRUE(holds_indices(*tensor)) << to_string(key);
            }
          }
          EXPECT_EQ(state.at("tensor"), Value(indices({9})));
          EXPECT_EQ(state.at("blob"), Value(List{1, "two", 3.0}));
          const auto rows = DTensor::from_checkpointable(state.at("rows").get<std::shared_ptr<Checkpointable>>());
          EXPECT_TRUE(rows->full_tensor().equal(indices({5, 4})));
        });
      }
    }
  }
}

TEST(SaveTransformTest, WithoutTheRegistryOrWithAnotherKeyEveryRankThrows) {
  const TemporaryDirectory directory;
  run_local(2, [&](const ProcessGroup& group) {
    SaveOptions options;
    options.transforms = {std::make_shared<const Xor>(0x5a)};
    save(transformed_state(group, true), directory.path(), group, options);
    StateDict state = transformed_state(group, false);
    EXPECT_ERROR(load(state, directory.path(), group), ErrorCode::unsupported,
                 "stored with the transform 'test.xor', which is not registered");
    LoadOptions wrong;
    wrong.transforms = registry_with_key(0x5b);
    EXPECT_ERROR(load(state, directory.path(), group, wrong), ErrorCode::corrupt, "__");
  });
}

TEST(SaveTransformTest, ABackgroundSaveTransformsAndCallsTheHooks) {
  const TemporaryDirectory directory;
  std::atomic<int> before = 0, after = 0;
  run_local(2, [&](const ProcessGroup& group) {
    AsyncSaveOptions options;
    options.transforms = {std::make_shared<const Xor>(0x5a)};
    options.before_commit = [&] { ++before; };
    options.after_commit = [&] {
      EXPECT_EQ(before % 2, 0);
      ++after;
    };
    AsyncSaver saver(group, options);
    for (const char* name : {"1", "2"}) saver.save(transformed_state(group, true), directory / name).get();
    StateDict state = transformed_state(group, false);
    LoadOptions known;
    known.transforms = registry_with_key(0x5a);
    load(state, directory / "2", group, known);
    EXPECT_EQ(state.at("tensor"), Value(indices({9})));
  });
  EXPECT_EQ(before, 4);
  EXPECT_EQ(after, 4);
}

// PyTorch: the experimental SyncCheckpointer and AsyncCheckpointer, which save a file for each rank.
TEST(RankAloneTest, EachRankSavesACheckpointOfItsOwnNowOrInTheBackground) {
  const TemporaryDirectory directory;
  run_local(3, [&](const ProcessGroup& group) {
    const StateDict state{{"model", Dict{{"w", at::full({4}, group.rank())}}}, {"epoch", 5 + group.rank()}};
    const std::string name = "checkpoint_" + std::to_string(group.rank());
    int before = 0, after = 0;
    AsyncSaveOptions options;
    options.before_commit = [&] { before += std::filesystem::exists(directory / (name + "/.metadata")) ? 100 : 1; };
    options.after_commit = [&] { after += std::filesystem::exists(directory / (name + "/.metadata")) ? 1 : 100; };
    save(state, directory / name, {}, options);
    EXPECT_EQ(load_full(directory / name), state);
    EXPECT_EQ(load_full(directory / name, {"epoch"}), (StateDict{{"epoch", 5 + group.rank()}}));
    std::filesystem::remove_all(directory / name);
    {
      AsyncSaver saver({}, options);
      saver.save(state, directory / name);
      saver.wait();
    }
    EXPECT_EQ(load_full(directory / name), state);
    EXPECT_EQ(before, 2);
    EXPECT_EQ(after, 2);
    save(state, directory / (name + "_without_hooks"));
    EXPECT_EQ(load_full(directory / (name + "_without_hooks")), state);
  });
}

// PyTorch reads an item of stream.zstd as one frame.
TEST(SaveTransformTest, AnItemOfZstdIsOneFrame) {
  if (!checkpoint::has_zstd()) GTEST_SKIP() << "tessera was built without libzstd, which is optional";
  const TemporaryDirectory directory;
  SaveOptions options;
  options.transforms = {checkpoint::zstd_transform()};
  save({{"zeros", at::zeros({100000})}}, directory.path(), {}, options);
  std::ifstream file(directory / "__0_0.distcp", std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), {});
  EXPECT_EQ(bytes.substr(0, 4), "\x28\xb5\x2f\xfd");
  EXPECT_EQ(bytes.find("\x28\xb5\x2f\xfd", 4), std::string::npos);
  EXPECT_LT(bytes.size(), 4000u);
  EXPECT_EQ(load_full(directory.path()), (StateDict{{"zeros", at::zeros({100000})}}));
}

}  // namespace
}  // namespace tessera
