// Loads files that are complete checkpoints by themselves into sharded states, and parts of checkpoints by name alone.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>

#include "state/parallel_mlp.h"
#include "support/error_matchers.h"
#include "support/golden.h"
#include "support/temporary_directory.h"
#include "tensor/sharding_support.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/load.h"
#include "tessera/state/object_archive.h"
#include "tessera/state/save.h"
#include "tessera/state/state_dict.h"
#include "tessera/tensor/dtensor.h"

namespace tessera {
namespace {

using testing::grid_spec;
using testing::holds_indices;
using testing::indices;
using testing::parallel_mlp;
using testing::ParallelMlp;
using testing::specs_of_every_kind;
using testing::TemporaryDirectory;

// PyTorch: DynamicMetaLoadPlanner and BroadcastingTorchSaveReader, which load a torch.save file.
TEST(LoadFileTest, ATorchSaveFileIsLoadedIntoEveryShardingOnAnyNumberOfRanks) {
  const TemporaryDirectory directory;
  const StateDict full{{"model", Dict{{"a", indices({7, 6})}, {"b", indices({6, 7}).t()}}},
                       {"list", List{indices({4}), 2, "three"}},
                       {"groups", List{Dict{{"lr", 0.1}, {"betas", Tuple{0.9, 0.999}}, {"extra", Dict()}}}},
                       {"step", 3}};
  write_new_file(directory / "state.pt", save_object(full));
  for (const int ranks : {1, 2, 5}) {
    run_local(ranks, [&](const ProcessGroup& group) {
      for (const auto& spec : specs_of_every_kind({7, 6}, group.size())) {
        ShardedTensorOptions options;
        options.dtype = at::kLong;
        const ShardedTensor a = ShardedTensor::zeros(spec, {7, 6}, group, options);
        StateDict state{{"model", Dict{{"a", a}, {"b", at::zeros({7, 6}, at::kLong)}}},
                        {"list", List{at::zeros({4}, at::kLong), 0, ""}},
                        {"groups", List{Dict{{"lr", 0.0}, {"betas", Tuple{0.0, 0.0}}, {"extra", Dict()}}}},
                        {"step", 0}};
        const LoadReport report = load(state, directory / "state.pt", group);
        EXPECT_TRUE(holds_indices(a)) << spec->to_string();
        state.at("model").get<Dict>()["a"] = indices({7, 6});
        EXPECT_EQ(state, full);
        // A rank reads its own rows only; "b" and "list" are read in full.
        if (ranks == 5 && spec->kind() == "ChunkShardingSpec") {
          EXPECT_LE(report.wanted_bytes, (2u * 6 + 42 + 4) * 8 + 7 * 2 * 8);
        }
      }
    });
  }
}

TEST(LoadFileTest, TheStateOfATrainingInPythonIsLoadedByAModelOnAMesh) {
  const TemporaryDirectory directory;
  ParallelMlp alone;
  torch::optim::Adam optimizer_alone(alone->parameters(), 0.01);
  testing::step(optimizer_alone);
  const StateDict full{{"model", get_model_state_dict(*alone)},
                       {"optimizer", get_optimizer_state_dict(*alone, optimizer_alone)}};
  write_new_file(directory / "state.pt", save_object(full));
  for (const auto& shape : {std::vector<std::int64_t>{1}, {3}, {2, 2}}) {
    std::int64_t ranks = 1;
    for (const std::int64_t n : shape) ranks *= n;
    run_local(static_cast<int>(ranks), [&](const ProcessGroup& group) {
      ParallelMlp model = parallel_mlp(testing::tensor_parallel_mesh(group, shape));
      torch::optim::Adam optimizer(model->parameters(), 0.5);
      const torch::NoGradGuard no_grad;
      for (at::Tensor& parameter : model->parameters()) parameter.zero_();
      StateDict state{{"model", get_model_state_dict(*model)},
                      {"optimizer", get_optimizer_state_dict(*model, optimizer)}};
      load(state, directory / "state.pt", group);
      set_state_dict(*model, {&optimizer}, state.at("model").get<Dict>(), state.at("optimizer").get<Dict>());
      StateDictOptions options;
      options.full_state_dict = true;
      options.group = group;
      const StateDicts now = get_state_dict(*model, {&optimizer}, options);
      EXPECT_EQ(now.model, full.at("model").get<Dict>());
      EXPECT_EQ(now.optimizer, full.at("optimizer").get<Dict>());
    });
  }
}

TEST(LoadFileTest, AFileThatPyTorchWroteAndASafetensorsFile) {
  const TemporaryDirectory directory;
  for (const char* version : {"2.6", "2.14"}) {
    const auto file = testing::golden_directory() / "torch_archive" / (std::string(version) + "-state.pt");
    const StateDict full = load_full(file);
    checkpoint::ConvertOptions options;
    options.to = checkpoint::SourceKind::safetensors;
    const auto converted = directory / (std::string(version) + ".safetensors");
    checkpoint::convert(checkpoint::Checkpoint::open(file), converted, options);
    const at::Tensor expected = full.at("model").get<Dict>().at("0.weight").get<at::Tensor>();
    run_local(3, [&](const ProcessGroup& group) {
      for (const auto& from : {file, converted}) {
        const ShardedTensor weight = ShardedTensor::zeros(grid_spec({2, 3}, {1, 2}, {2, 0, 1}), {2, 3}, group);
        StateDict state{{"model", Dict{{"0.weight", weight}}}};
        load(state, from, group);
        EXPECT_TRUE(at::equal(testing::full_of(weight), expected.detach())) << from;
      }
    });
  }
}

TEST(LoadFileTest, MistakesAndDamageAreErrorsOnAllRanks) {
  const TemporaryDirectory directory;
  const StateDict full{{"w", at::ones({4, 2})}};
  write_new_file(directory / "a.pt", save_object(full));
  save(full, directory / "a");
  Bytes damaged = save_object(full);
  for (std::size_t i = 0; i + 4 < damaged.size(); ++i) {  // the elements
    if (damaged[i + 2] == 0x80 && damaged[i + 3] == 0x3F && damaged[i] == 0 && damaged[i + 1] == 0) damaged[i + 2] = 0;
  }
  write_new_file(directory / "damaged.pt", damaged);
  write_new_file(directory / "none.pt", as_bytes("text"));
  run_local(2, [&](const ProcessGroup& group) {
    const auto load_of = [&](const std::string& name, std::int64_t rows = 4) {
      StateDict state{{"w", at::zeros({rows, 2})}};
      load(state, directory / name, group);
    };
    load_of("a.pt");
    EXPECT_ERROR(load_of(group.rank() == 0 ? "a.pt" : "a"), ErrorCode::invalid_argument, "file a.pt", "directory a");
    EXPECT_ERROR(load_of(group.rank() == 0 ? "a.pt" : "damaged.pt"), ErrorCode::invalid_argument, "damaged.pt");
    EXPECT_ERROR(load_of("a.pt", group.rank() == 1 ? 5 : 4), ErrorCode::invalid_argument,
                 "rank 1: ", "tensor 'w' has shape [4, 2], expected [5, 2]");
    EXPECT_ERROR(load_of("damaged.pt"), ErrorCode::corrupt, "damaged.pt", "CRC-32");
    EXPECT_ERROR(load_of("none.pt"), ErrorCode::corrupt, "none.pt",
                 "expected a torch.save archive or a safetensors file");
    EXPECT_ERROR(load_of("missing.pt"), ErrorCode::not_found, "missing.pt");
    load_of("a.pt");
  });
}

// PyTorch: _load_state_dict_from_keys.
TEST(LoadFullTest, NamesSelectValuesAndEverythingBelowThem) {
  const TemporaryDirectory directory;
  const StateDict full{{"model", Dict{{"layer", Dict{{"w", indices({3, 2})}, {"b", indices({2})}}},
                                      {"layer2", Dict{{"w", indices({5})}}}}},
                       {"groups", List{Dict{{"lr", 0.1}}, Dict{{"lr", 0.2}}}},
                       {"step", 3},
                       {"name", "run"}};
  save(full, directory / "ckpt");
  write_new_file(directory / "state.pt", save_object(full));
  for (const char* from : {"ckpt", "state.pt"}) {
    const auto of = [&](const std::vector<std::string>& names) { return load_full(directory / from, names); };
    EXPECT_EQ(of({"step"}), (StateDict{{"step", 3}}));
    EXPECT_EQ(of({"name", "step"}), (StateDict{{"step", 3}, {"name", "run"}})) << "in the checkpoint's order";
    EXPECT_EQ(of({"model.layer"}),
              (StateDict{{"model", Dict{{"layer", Dict{{"w", indices({3, 2})}, {"b", indices({2})}}}}}}));
    EXPECT_EQ(
        of({"model.layer2.w", "model.layer.b"}),
        (StateDict{{"model", Dict{{"layer", Dict{{"b", indices({2})}}}, {"layer2", Dict{{"w", indices({5})}}}}}}));
    EXPECT_EQ(of({"groups.1"}), (StateDict{{"groups", List{Value(), Dict{{"lr", 0.2}}}}}));
    EXPECT_EQ(of({"model", "groups", "step", "name", "model.layer"}), full);
    EXPECT_EQ(of({}), StateDict());
    EXPECT_ERROR(of({"step", "model.lay"}), ErrorCode::not_found,
                 "the checkpoint has no 'model.lay', expected a saved name or one that others begin with");
  }
}

}  // namespace
}  // namespace tessera
