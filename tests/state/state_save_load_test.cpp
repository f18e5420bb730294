// Saves state dicts on N ranks and loads them on M.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "support/error_matchers.h"
#include "support/rank_processes.h"
#include "support/temporary_directory.h"
#include "tensor/sharding_support.h"
#include "tessera/checkpoint/faulty_storage.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/async_save.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using testing::fill_with_indices;
using ::testing::HasSubstr;
using testing::holds_indices;
using testing::indices;
using testing::Sizes;
using testing::SpecPtr;
using testing::specs_of_every_kind;
using testing::TemporaryDirectory;

const std::vector<Sizes>& sizes() {
  static const std::vector<Sizes> all = {{7}, {8, 4}, {3, 2, 5}};
  return all;
}

// Returns one tensor for each size and each spec of this number of ranks.
Dict sharded_tensors(const ProcessGroup& group, bool filled) {
  Dict tensors;
  for (const Sizes& size : sizes()) {
    const std::vector<SpecPtr> specs = specs_of_every_kind(size, group.size());
    for (std::size_t i = 0; i < specs.size(); ++i) {
      ShardedTensorOptions options;
      options.dtype = at::kLong;
      const ShardedTensor tensor = ShardedTensor::full(specs[i], size, -1, group, options);
      if (filled) fill_with_indices(tensor);
      tensors.insert_or_assign(shape_to_string(size) + " spec " + std::to_string(i), tensor);
    }
  }
  return tensors;
}

StateDict state_of(const ProcessGroup& group, bool filled) {
  const std::int64_t step = filled ? 1234567890123 : 0;
  return {{"model", sharded_tensors(group, filled)},
          {"replicated", filled ? indices({5, 3}) : at::zeros({5, 3}, at::kLong)},
          {"transposed", (filled ? indices({4, 6}) : at::zeros({4, 6}, at::kLong)).t()},
          {"optimizer", Dict{{"groups", List{Dict{{"lr", filled ? 0.1 : 0.0}, {"betas", Tuple{0.9, 0.999}}}}},
                             {"steps", List{filled ? indices({2}) : at::zeros({2}, at::kLong), step}}}},
          {"step", step},
          {"name", filled ? "run" : ""}};
}

class SaveLoadTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, SaveLoadTest, ::testing::Values(1, 2, 3, 4, 8));

// The names depend on the number of ranks, so only the names in both states are compared.
TEST_P(SaveLoadTest, WhatIsSavedIsLoadedInPlaceBySomeRanksOrOthers) {
  const auto storage = checkpoint::memory_storage();
  run_local(GetParam(), [&](const ProcessGroup& group) { save(state_of(group, true), storage, group); });
  for (const int ranks : {1, 2, 5, 8}) {
    run_local(ranks, [&](const ProcessGroup& group) {
      StateDict state = state_of(group, false);
      const StateDict before = state;
      load(state, storage, group);
      for (const auto& [name, tensor] : state.at("model").get<Dict>()) {
        EXPECT_TRUE(holds_indices(tensor.get<ShardedTensor>())) << to_string(name);
      }
      const StateDict expected = state_of(group, true);
      for (const char* key : {"replicated", "transposed", "optimizer", "step", "name"}) {
        EXPECT_EQ(state.at(key), expected.at(key)) << key;
      }
      // Loaded in place: references to the tensors made before see the elements.
      EXPECT_TRUE(before.at("replicated").get<at::Tensor>().is_same(state.at("replicated").get<at::Tensor>()));
    });
  }
}

// Notes whether a rank reads or writes `.metadata`.
std::shared_ptr<checkpoint::Storage> noting_metadata(const std::shared_ptr<checkpoint::Storage>& inner, bool& touched) {
  return checkpoint::faulty_storage(inner, [&touched](const checkpoint::StorageEvent& event) {
    if (event.file.find("metadata") != std::string::npos) touched = true;
    return checkpoint::StorageFault::none;
  });
}

TEST(CoordinatorTest, ItAloneWritesAndReadsTheMetadata) {
  for (const int coordinator : {0, 1, 2}) {
    for (const int different : {0, 1, 2}) {  // this rank has another name than the others
      const auto storage = checkpoint::memory_storage();
      run_local(3, [&](const ProcessGroup& group) {
        const auto with_own_name = [&](StateDict state, const Value& value) {
          state[group.rank() == different ? "of one" : "of others"] = value;
          return state;
        };
        bool wrote = false, read = false;
        SaveOptions save_options;
        save_options.coordinator_rank = coordinator;
        save(with_own_name(state_of(group, true), 7), noting_metadata(storage, wrote), group, save_options);
        EXPECT_EQ(wrote, group.rank() == coordinator);
        LoadOptions load_options;
        load_options.coordinator_rank = coordinator;
        StateDict state = with_own_name(state_of(group, false), 0);
        load(state, noting_metadata(storage, read), group, load_options);
        EXPECT_EQ(read, group.rank() == coordinator);
        const StateDict expected = with_own_name(state_of(group, true), 7);
        for (const auto& [name, value] : expected) {
          if (name == Key("model")) continue;
          EXPECT_EQ(state.at(name), value) << to_string(name);
        }
        for (const auto& [name, tensor] : state.at("model").get<Dict>()) {
          EXPECT_TRUE(holds_indices(tensor.get<ShardedTensor>())) << to_string(name);
        }
      });
    }
  }
}

TEST(CoordinatorTest, AnotherOnePlansAgainInsteadOfReusingThePlan) {
  const auto storage = checkpoint::memory_storage();
  run_local(2, [&](const ProcessGroup& group) {
    checkpoint::SavePlanCache cache;
    SaveOptions options;
    options.cache = &cache;
    std::vector<bool> reused;
    for (const int coordinator : {0, 0, 1, 1}) {
      options.coordinator_rank = coordinator;
      reused.push_back(save(state_of(group, true), storage, group, options).plan_was_reused);
    }
    EXPECT_THAT(reused, ElementsAre(false, true, false, true));
    StateDict state = state_of(group, false);
    load(state, storage, group);
    EXPECT_EQ(state.at("step"), state_of(group, true).at("step"));
  });
}

// PyTorch: no_dist.
TEST(SaveTest, WithoutAGroupARankSavesAndLoadsAlone) {
  const TemporaryDirectory directory;
  run_local(3, [&](const ProcessGroup& group) {
    if (group.rank() != 1) return;  // the others do not take part
    save({{"w", indices({2, 3})}, {"step", 3}}, directory / "ckpt");
    StateDict state{{"w", at::zeros({2, 3}, at::kLong)}, {"step", 0}};
    load(state, directory / "ckpt");
    EXPECT_EQ(Value(state), Value(Dict{{"w", indices({2, 3})}, {"step", 3}}));
  });
}

TEST(LoadTest, AutogradNoticesThatSavedTensorsAreChanged) {
  const TemporaryDirectory directory;
  save({{"w", at::ones({3})}}, directory / "ckpt");
  const at::Tensor w = at::zeros({3}).requires_grad_();
  const at::Tensor loss = w.square().sum();
  StateDict state{{"w", w}};
  load(state, directory / "ckpt");
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(SaveTest, AWholeStateIsLoadedNestedAsItWas) {
  const TemporaryDirectory directory;
  const StateDict state = {{"z", Dict{{"w", indices({2, 3}, at::kFloat)}, {"none", Value()}}},
                           {"list", List{at::ones({}), 2, "three"}},
                           {"tuple", Tuple{1, indices({2})}},
                           {"flag", true}};
  save(state, directory / "ckpt");
  EXPECT_EQ(load_full(directory / "ckpt"), state);
  EXPECT_TRUE(checkpoint::verify(directory / "ckpt").good());
}

TEST(SaveTest, EveryDtypeOfThisLibTorch) {
  const TemporaryDirectory directory;
  StateDict state;
  for (const at::ScalarType type :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong,
        at::kBool, at::kComplexHalf, at::kComplexFloat, at::kComplexDouble}) {
    const at::Tensor bytes = at::arange(0, 96 * static_cast<std::int64_t>(c10::elementSize(type))).to(at::kByte);
    state.insert_or_assign(c10::toString(type),
                           type == at::kBool ? bytes.remainder(2).to(at::kBool) : bytes.view(type));
  }
  save(state, directory / "ckpt");
  EXPECT_EQ(load_full(directory / "ckpt"), state);
}

TEST(SaveTest, ViewsAreSavedAsWhatTheyShow) {
  const TemporaryDirectory directory;
  const at::Tensor base = indices({6, 8}, at::kComplexFloat);
  save({{"rows", base.slice(0, 1, 6, 2)},
        {"expanded", at::ones({1}).expand({3, 2})},
        {"conjugated", base.conj()},
        {"negative", at::imag(base.conj())}},
       directory / "ckpt");
  const StateDict loaded = load_full(directory / "ckpt");
  EXPECT_TRUE(at::equal(loaded.at("rows").get<at::Tensor>(), base.slice(0, 1, 6, 2)));
  EXPECT_TRUE(at::equal(loaded.at("expanded").get<at::Tensor>(), at::ones({3, 2})));
  EXPECT_TRUE(at::equal(loaded.at("conjugated").get<at::Tensor>(), base.conj().resolve_conj()));
  EXPECT_TRUE(at::equal(loaded.at("negative").get<at::Tensor>(), at::imag(base.conj()).clone()));
}

TEST(SaveTest, TensorsThatRequireGradAreSavedAndLoadedInPlace) {
  const TemporaryDirectory directory;
  const at::Tensor base = indices({6, 8}, at::kComplexFloat);
  const auto with_grad = [](const at::Tensor& tensor) { return tensor.clone().requires_grad_(); };
  const at::Tensor leaf = with_grad(base), history = leaf * 2;
  save({{"leaf", leaf}, {"history", history}, {"conjugated", leaf.conj()}}, directory / "ckpt");
  const at::Tensor zeros = with_grad(at::zeros_like(base)),
                   conjugated = with_grad(at::zeros_like(base)).detach().conj();
  StateDict loaded{{"leaf", zeros}, {"history", with_grad(at::zeros_like(base))}, {"conjugated", conjugated}};
  load(loaded, directory / "ckpt");
  EXPECT_TRUE(at::equal(zeros.detach(), base));
  EXPECT_TRUE(zeros.requires_grad() && zeros.is_leaf());
  EXPECT_TRUE(at::equal(loaded.at("history").get<at::Tensor>().detach(), base * 2));
  EXPECT_TRUE(at::equal(conjugated.resolve_conj(), base.conj().resolve_conj()));
}

TEST(SaveTest, WhatCannotBeSavedIsNamedOnAllRanks) {
  run_local(2, [](const ProcessGroup& group) {
    StateDict state{{"a", Dict{{"good", at::ones({2})}}}};
    if (group.rank() == 1) state.at("a").get<Dict>()["bad"] = at::ones({2}).to_sparse();
    EXPECT_ERROR(save(state, checkpoint::memory_storage(), group), ErrorCode::unsupported,
                 "1 of 2 ranks failed; rank 1: save 'a.bad': the tensor has layout Sparse");
  });
}

TEST(SaveTest, ATensorWithoutMemoryIsAnErrorOnAllRanksAndAnEmptyOneIsSaved) {
  const auto meta = [](std::vector<std::int64_t> size) {
    return at::empty(size, at::TensorOptions().device(at::kMeta));
  };
  const auto storage = checkpoint::memory_storage();
  run_local(2, [&](const ProcessGroup& group) {
    const auto spec = std::make_shared<ChunkShardingSpec>(0, std::vector<RemoteDevice>{RemoteDevice("rank:1/meta")});
    for (const Value& bad : {Value(meta({2})), Value(ShardedTensor::empty(spec, {2}, group))}) {
      StateDict state{{"a", Dict{{"good", at::ones({2})}}}};
      if (group.rank() == 1) state.at("a").get<Dict>()["bad"] = bad;
      const std::string what = "1 of 2 ranks failed; rank 1: save 'a.bad': found ";
      EXPECT_ERROR(save(state, storage, group), ErrorCode::unsupported, what, "expected a tensor with memory");
      AsyncSaver saver(group);
      EXPECT_ERROR(saver.save(state, storage), ErrorCode::unsupported, what, "expected a tensor with memory");
      saver.save({{"empty", meta({0, 3})}}, storage).get();
    }
    save({{"empty", meta({0, 3})}}, storage, group);
    StateDict loaded{{"empty", at::zeros({0, 3})}};
    load(loaded, storage, group);
  });
}

TEST(LoadTest, ADictKeepsItsIntKeysAndTheirValuesAreReplaced) {
  for (const bool is_flat : {true, false}) {
    const TemporaryDirectory directory;
    SaveOptions save_options;
    LoadOptions load_options;
    save_options.flatten_state_dict = load_options.flatten_state_dict = is_flat;
    const StateDict saved{{"a", Dict{{0, 1}, {7, List{Dict{{3, "in a list"}}}}}}, {5, "x"}};
    StateDict state{{"a", Dict{{0, 0}, {7, List{Dict{{3, ""}}}}}}, {5, ""}};
    save(saved, directory / "1", {}, save_options);
    load(state, directory / "1", {}, load_options);
    EXPECT_EQ(state, saved);
    save(state, directory / "2", {}, save_options);
  }
}

TEST(LoadTest, RefusalsLeaveObjectsAsTheyWere) {
  const TemporaryDirectory directory;
  save({{"w", at::ones({2, 3})}, {"o", 1}}, directory / "ckpt");
  const auto refuse = [&](StateDict state, ErrorCode code, const std::string& what) {
    state["o"] = 7;
    EXPECT_ERROR(load(state, directory / "ckpt"), code, what);
    EXPECT_EQ(state.at("o"), Value(7));
  };
  refuse({{"w", at::zeros({3, 2})}}, ErrorCode::invalid_argument, "tensor 'w' has shape [2, 3], expected [3, 2]");
  refuse({{"w", at::zeros({2, 3}, at::kHalf)}}, ErrorCode::invalid_argument, "tensor 'w' has dtype float32");
  refuse({{"missing", at::zeros({2, 3})}}, ErrorCode::not_found, "no 'missing'");
  refuse({{"w", 5}}, ErrorCode::invalid_argument, "'w' is a tensor, expected an object");
  refuse({{"w", at::zeros({1}).expand({2, 3})}}, ErrorCode::invalid_argument, "load 'w': ");
  LoadOptions options;
  options.rules.allow_partial = options.rules.allow_cast = true;
  StateDict state{{"w", at::zeros({2, 3}, at::kHalf)}, {"missing", 3}, {"o", 0}};
  EXPECT_THAT(load(state, directory / "ckpt", {}, options).missing, ElementsAre("missing"));
  EXPECT_EQ(state, (StateDict{{"w", at::ones({2, 3}, at::kHalf)}, {"missing", 3}, {"o", 1}}));
}

// Before PyTorch 2.4, a dict without tensors was saved as one object.
TEST(LoadTest, RanksOfANodeReadOnceWhatAllOfThemWant) {
  const TemporaryDirectory directory;
  const at::Tensor saved = at::arange(300000, at::kDouble).view({1000, 300});
  save({{"w", saved}}, directory / "ckpt");
  std::atomic<std::uint64_t> read_bytes = 0;
  run_local(4, [&](const ProcessGroup& group) {
    LoadOptions options;
    const auto first = group.subgroup(std::vector<int>{0, 1}), second = group.subgroup(std::vector<int>{2, 3});
    options.node_group = first ? *first : *second;
    StateDict state{{"w", at::zeros({1000, 300}, at::kFloat)}};
    options.rules.allow_cast = true;
    read_bytes += load(state, directory / "ckpt", group, options).read_bytes;
    EXPECT_TRUE(at::equal(state.at("w").get<at::Tensor>(), saved.to(at::kFloat)));
  });
  EXPECT_EQ(read_bytes, 2 * saved.nbytes());
}

TEST(LoadTest, NamesOfOldCheckpointsAreRecognised) {
  const TemporaryDirectory directory;
  SaveOptions flat;
  flat.flatten_state_dict = false;
  save({{"model.w", at::ones({2})}, {"extra", Dict{{"a", 1}, {"b", List{2}}}}}, directory / "ckpt", {}, flat);
  StateDict state{{"model", Dict{{"w", at::zeros({2})}}}, {"extra", Dict{{"a", 0}, {"b", List{0}}}}};
  load(state, directory / "ckpt");
  EXPECT_EQ(state, (StateDict{{"model", Dict{{"w", at::ones({2})}}}, {"extra", Dict{{"a", 1}, {"b", List{2}}}}}));
}

// --- dying ranks, as processes

std::string save_then_load(const ProcessGroup& group, const std::filesystem::path& directory, std::uint64_t dies_at,
                           bool dies_in_load) {
  const auto dying = [&](bool applies) {
    return checkpoint::faulty_storage(checkpoint::file_system_storage(directory),
                                      [&, applies](const checkpoint::StorageEvent& event) {
                                        if (applies && group.rank() == 1 && event.number == dies_at)
                                          ::kill(::getpid(), SIGKILL);
                                        return checkpoint::StorageFault::none;
                                      });
  };
  StateDict state = state_of(group, true);
  save(state, dying(!dies_in_load), group);
  load(state, dying(dies_in_load), group);
  return "nothing happened";
}

class DyingRankTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Phases, DyingRankTest, ::testing::Bool());

TEST_P(DyingRankTest, IsNamedToAllOthers) {
  int died = 0;
  for (std::uint64_t at = 0; at < (GetParam() ? 12 : 60); at += GetParam() ? 3 : 2) {
    const TemporaryDirectory directory;
    const auto outcomes = testing::run_processes(3, testing::quick(), [&](const ProcessGroup& group) {
      return save_then_load(group, directory / "ckpt", at, GetParam());
    });
    if (outcomes[1].signal != SIGKILL) continue;
    ++died;
    for (const int rank : {0, 2}) {
      EXPECT_THAT(outcomes[static_cast<std::size_t>(rank)].report, HasSubstr("rank_failure: "));
      EXPECT_THAT(outcomes[static_cast<std::size_t>(rank)].report, HasSubstr("rank 1 died"));
    }
  }
  EXPECT_GE(died, 2);
}

TEST(SaveFailureTest, ARankThatCannotWriteIsNamedWithItsFile) {
  const TemporaryDirectory directory;
  run_local(3, [&](const ProcessGroup& group) {
    const auto storage = checkpoint::faulty_storage(
        checkpoint::file_system_storage(directory / "ckpt"), [&](const checkpoint::StorageEvent& event) {
          return group.rank() == 2 && event.step == checkpoint::StorageStep::write ? checkpoint::StorageFault::io_error
                                                                                   : checkpoint::StorageFault::none;
        });
    EXPECT_ERROR(save(state_of(group, true), storage, group), ErrorCode::io, "1 of 3 ranks failed; rank 2: write ",
                 "__2_0.distcp");
  });
  EXPECT_TRUE(std::filesystem::is_empty(directory / "ckpt"));
}

}  // namespace
}  // namespace tessera
