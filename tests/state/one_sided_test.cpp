// What is wrong on one rank when a state is saved or loaded is an error on all of them.

#include "support/one_sided.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "state/parallel_mlp.h"
#include "support/temporary_directory.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/storage.h"
#include "tessera/checkpoint/transform.h"
#include "tessera/state/async_save.h"
#include "tessera/state/checkpoint_manager.h"
#include "tessera/state/gather_state_dict.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"
#include "tessera/state/state_dict.h"
#include "tessera/state/stateful.h"
#include "tessera/tensor/dtensor.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::expect_error_soon;
using testing::OneSidedCall;
using testing::quick;
using testing::TemporaryDirectory;

StateDict state_of(const std::string& mistake) {
  StateDict state{{"weight", at::ones({4, 3})}, {"step", 3}};
  if (mistake == "another shape") state["weight"] = at::ones({3, 4});
  if (mistake == "another dtype") state["weight"] = at::ones({4, 3}, at::kDouble);
  if (mistake == "a sparse tensor") state["weight"] = at::ones({4, 3}).to_sparse();
  if (mistake == "one name twice") state = {{"a", Dict{{"b", 1}}}, {"a.b", 2}};
  if (mistake == "a name that is not saved") state["more"] = at::ones({2});
  return state;
}

// The functions of the second stateful are collectives.
StateDict stateful_state(const ProcessGroup& group, const std::string& mistake) {
  const StateDict inner{{"count", 3}};
  const auto first = stateful(
      [=] {
        if (mistake == "a failing state_dict") fail(ErrorCode::io, "it fails");
        return inner;
      },
      [=](const StateDict&) {
        if (mistake == "a failing load_state_dict") fail(ErrorCode::io, "it fails");
      });
  const auto second = stateful(
      [=] {
        group.barrier();
        return inner;
      },
      [=](const StateDict&) { group.barrier(); });
  if (mistake == "no stateful") return {{"a", first}, {"b", inner}};
  if (mistake == "a stateful in a list") return {{"a", first}, {"b", List{second}}};
  StateDict state{{"a", first}, {"b", second}};
  if (mistake == "one name twice") state["b.count"] = 3;
  return state;
}

int coordinator_of(const ProcessGroup& group, const std::string& mistake) {
  return mistake == "another coordinator" ? 1 : mistake == "a coordinator outside of the group" ? group.size() : 0;
}

fs::path directory_of(const fs::path& base, const std::string& mistake) {
  return base / (mistake == "another directory" ? "step-2" : "step-1");
}

struct NoTransform final : checkpoint::StreamTransform {
  std::string descriptor() const override { return "none"; }
  std::unique_ptr<checkpoint::ByteSink> apply(checkpoint::ByteSink&) const override { return nullptr; }
  std::unique_ptr<checkpoint::ByteSink> undo(checkpoint::ByteSink&) const override { return nullptr; }
};

void refuse_commit() { fail(ErrorCode::io, "no commit"); }

std::vector<OneSidedCall> all_calls(const ProcessGroup& group, const fs::path& base) {
  if (group.rank() == 0) fs::create_directories(base);
  group.barrier();
  for (const char* name : {"step-1", "step-2"}) save(state_of(""), base / name, group);
  const auto manager = std::make_shared<CheckpointManager>(base / "managed", group);
  return {
      {"save",
       {"another directory", "a null storage", "another format", "another dialect", "a state that is not flattened",
        "another coordinator", "a coordinator outside of the group", "one name twice", "a sparse tensor",
        "another shape", "another dtype", "another transform", "a null transform",
        "a hook before the commit that throws", "a hook after the commit that throws"},
       [base](const ProcessGroup& g, const std::string& mistake) {
         SaveOptions options;
         if (mistake == "another transform") options.transforms = {std::make_shared<const NoTransform>()};
         if (mistake == "a null transform") options.transforms = {nullptr};
         if (mistake == "a hook before the commit that throws") options.before_commit = &refuse_commit;
         if (mistake == "a hook after the commit that throws") options.after_commit = &refuse_commit;
         if (mistake == "another format") options.format = checkpoint::SaveFormat::safetensors_shards;
         if (mistake == "another dialect") options.dialect = dcp::Dialect::torch_1_13;
         options.flatten_state_dict = mistake != "a state that is not flattened";
         options.coordinator_rank = coordinator_of(g, mistake);
         if (mistake == "a null storage") {
           save(state_of(mistake), std::shared_ptr<checkpoint::Storage>(), g, options);
         } else {
           save(state_of(mistake), directory_of(base, mistake), g, options);
         }
       }},
      {"load",
       {"another directory", "a null storage", "a name that is not saved", "another shape", "another dtype",
        "another coordinator", "a coordinator outside of the group", "a node group"},
       [base](const ProcessGroup& g, const std::string& mistake) {
         StateDict state = state_of(mistake);
         LoadOptions options;
         if (mistake == "a node group") options.node_group = g;
         options.coordinator_rank = coordinator_of(g, mistake);
         if (mistake == "a null storage") {
           load(state, std::shared_ptr<checkpoint::Storage>(), g, options);
         } else {
           load(state, directory_of(base, mistake), g, options);
         }
       }},
      {"save",
       {"a failing state_dict", "no stateful", "a stateful in a list", "one name twice"},
       [base](const ProcessGroup& g, const std::string& mistake) {
         save(stateful_state(g, mistake), base / "stateful", g);
       }},
      {"load",
       {"a failing state_dict", "a failing load_state_dict", "no stateful", "a stateful in a list"},
       [base](const ProcessGroup& g, const std::string& mistake) {
         StateDict state = stateful_state(g, mistake);
         load(state, base / "stateful", g);
       }},
      {"make an AsyncSaver",
       {"another choice when busy", "another time to throw", "another coordinator",
        "a coordinator outside of the group"},
       [](const ProcessGroup& g, const std::string& mistake) {
         AsyncSaveOptions options;
         if (mistake == "another choice when busy") options.when_busy = AsyncSaveOptions::WhenBusy::refuse;
         options.throw_at_next_call = mistake != "another time to throw";
         options.coordinator_rank = coordinator_of(g, mistake);
         AsyncSaver(g, options);
       }},
      {"save",
       {"another directory", "a null storage", "one name twice", "a sparse tensor", "another shape",
        "a function after it", "a function after it that throws"},
       [base](const ProcessGroup& g, const std::string& mistake) {
         AsyncSaver saver(g);
         const auto storage = checkpoint::file_system_storage(directory_of(base, mistake));
         std::function<void()> then;
         if (mistake != "a function after it") then = [] {};
         if (mistake == "a function after it that throws") then = [] { fail(ErrorCode::io, "it fails"); };
         saver.save(state_of(mistake), mistake == "a null storage" ? nullptr : storage, then).get();
       }},
      {"make a CheckpointManager",
       {"another directory", "another period", "a period of 0", "none to keep", "another format", "not asynchronous"},
       [base](const ProcessGroup& g, const std::string& mistake) {
         CheckpointManagerOptions options;
         if (mistake == "another period") options.save_every = 2;
         if (mistake == "a period of 0") options.save_every = 0;
         if (mistake == "none to keep") options.keep_last = 0;
         if (mistake == "another format") options.save.format = checkpoint::SaveFormat::safetensors_shards;
         options.async = mistake != "not asynchronous";
         CheckpointManager(directory_of(base / "others", mistake), g, options);
       }},
      {"save",
       {"another step", "one name twice", "another shape"},
       [manager](const ProcessGroup&, const std::string& mistake) {
         manager->save(mistake == "another step" ? 2 : 1, state_of(mistake));
         manager->wait();
       }},
      {"restore",
       {"another step of it", "another shape", "the restore of a step"},
       [manager](const ProcessGroup&, const std::string& mistake) {
         StateDict state = state_of(mistake);
         try {
           if (mistake == "the restore of a step") return manager->restore(1, state);
           if (mistake != "another step of it") return static_cast<void>(manager->restore_latest(state));
           manager->restore(2, state);
         } catch (const Error& error) {  // load(), which it calls, names itself
           throw Error(error.code(), std::string("restore: ") + error.what());
         }
       }},
  };
}

StateDictOptions options_of(const ProcessGroup& group, const std::string& mistake) {
  StateDictOptions options;
  options.group = group;
  options.full_state_dict = mistake != "not the full state";
  options.cpu_offload = mistake == "only on rank 0";
  options.ignore_frozen_params = mistake == "no frozen parameters";
  options.strict = mistake != "not strict";
  options.flatten_optimizer_state_dict = mistake == "flattened";
  options.take_tensors = mistake == "taken tensors";
  if (mistake == "a confirmation") options.confirm = [] {};
  return options;
}

std::vector<OneSidedCall> state_dict_calls(const ProcessGroup& group) {
  const DeviceMesh mesh(group, {group.size()});
  const std::shared_ptr<testing::ParallelMlpImpl> model = testing::parallel_mlp(mesh).ptr();
  const auto optimizer = std::make_shared<torch::optim::Adam>(model->parameters());
  const StateDictOptions full = options_of(group, "");
  const auto [model_state, optimizer_state] = get_state_dict(*model, {optimizer.get()}, full);
  const auto optimizers_of = [optimizer](const std::string& mistake) {
    std::vector<torch::optim::Optimizer*> optimizers = {optimizer.get()};
    if (mistake == "no optimizer") optimizers.clear();
    if (mistake == "a null optimizer") optimizers = {nullptr};
    return optimizers;
  };
  return {
      {"gather a state dict",
       {"another size", "another name", "no sharded tensor", "only on rank 0", "a nested sharded tensor"},
       [mesh](const ProcessGroup& g, const std::string& mistake) {
         const at::Tensor rows = at::ones({2, 3});
         const bool is_wide = mistake == "another size";
         StateDict state{{mistake == "another name" ? "v" : "w",
                          DTensor::from_local(is_wide ? at::ones({2, 4}) : rows, mesh, {Placement::shard(0)})}};
         if (mistake == "no sharded tensor") state = {{"w", rows}};
         if (mistake == "a nested sharded tensor") state["nested"] = NestedShardedTensor();
         gather_state_dict(state, g, mistake == "only on rank 0");
       }},
      {"get state dict",
       {"not the full state", "only on rank 0", "no frozen parameters", "flattened", "no optimizer", "a null optimizer",
        "a submodule of another model", "a submodule"},
       [model, optimizers_of](const ProcessGroup& g, const std::string& mistake) {
         StateDictOptions options = options_of(g, mistake);
         if (mistake == "a submodule") options.submodules = {model->up.ptr()};
         if (mistake == "a submodule of another model") options.submodules = {testing::ParallelMlp()->up.ptr()};
         get_state_dict(*model, optimizers_of(mistake), options);
       }},
      {"set state dict",
       {"not strict", "taken tensors", "a confirmation", "no optimizer", "a null optimizer", "a missing name",
        "another shape", "a missing option", "no state at all"},
       [=, model_state = model_state, optimizer_state = optimizer_state](const ProcessGroup& g,
                                                                         const std::string& mistake) {
         StateDicts states{model_state, optimizer_state};
         if (mistake == "a missing name") states.model.erase("up.bias");
         if (mistake == "another shape") states.model["up.bias"] = at::ones({7});
         if (mistake == "a missing option") {
           states.optimizer.at("param_groups").get<List>()[0].get<Dict>().erase("lr");
         }
         if (mistake == "no state at all") states.optimizer = {};
         set_state_dict(*model, optimizers_of(mistake), states.model, states.optimizer, options_of(g, mistake));
       }},
      {"set model state dict",
       {"no broadcast", "a broadcast without full tensors", "another model"},
       [=, model_state = model_state](const ProcessGroup& g, const std::string& mistake) {
         StateDictOptions options = options_of(g, "");
         options.broadcast_from_rank0 = mistake != "no broadcast";
         options.full_state_dict = mistake != "a broadcast without full tensors";
         const std::shared_ptr<torch::nn::Module> other = torch::nn::Linear(6, 5).ptr();
         set_model_state_dict(mistake == "another model" ? *other : *model, g.rank() == 0 ? model_state : StateDict(),
                              options);
       }},
  };
}

class OneSidedStateTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, OneSidedStateTest, ::testing::Values(2, 3, 4));

TEST_P(OneSidedStateTest, AMistakeIsAnErrorOnAllRanksAsThreads) {
  const TemporaryDirectory directory;
  testing::make_mistakes_as_threads(
      GetParam(), [&](const ProcessGroup& group) { return all_calls(group, directory.path() / "checkpoints"); });
}

TEST_P(OneSidedStateTest, AMistakeIsAnErrorOnAllRanksAsProcesses) {
  const TemporaryDirectory directory;
  testing::make_mistakes_as_processes(
      GetParam(), [&](const ProcessGroup& group) { return all_calls(group, directory.path() / "checkpoints"); });
}

TEST_P(OneSidedStateTest, AMistakeWithStateDictsIsAnErrorOnAllRanksAsThreads) {
  testing::make_mistakes_as_threads(GetParam(), state_dict_calls);
}

TEST_P(OneSidedStateTest, AMistakeWithStateDictsIsAnErrorOnAllRanksAsProcesses) {
  testing::make_mistakes_as_processes(GetParam(), state_dict_calls);
}

// Steps that are not due do not communicate, so `save` does not compare before it knows that a step is due.
TEST(OneSidedStateStepTest, AStepBelowZeroIsNamedToAll) {
  const TemporaryDirectory directory;
  testing::expect_good_processes(3, quick(), [&](const ProcessGroup& group) {
    CheckpointManager manager(directory.path() / "checkpoints", group);
    manager.save(1, state_of(""));
    manager.wait();
    expect_error_soon(
        [&] {
          try {
            manager.save(group.rank() == 1 ? -1 : 2, state_of(""));
          } catch (const Error&) {
            if (group.rank() != 1) throw;
          }
          group.barrier();
        },
        {"rank 1 left save of a CheckpointManager: checkpoint manager: save of step -1, expected"});
  });
}

}  // namespace
}  // namespace tessera
