// What is wrong on one rank when a state is saved or loaded is an error on all of them.

#include "support/one_sided.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/temporary_directory.h"
#include "tessera/checkpoint/storage.h"
#include "tessera/state/async_save.h"
#include "tessera/state/checkpoint_manager.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"

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

fs::path directory_of(const fs::path& base, const std::string& mistake) {
  return base / (mistake == "another directory" ? "step-2" : "step-1");
}

std::vector<OneSidedCall> all_calls(const ProcessGroup& group, const fs::path& base) {
  if (group.rank() == 0) fs::create_directories(base);
  group.barrier();
  for (const char* name : {"step-1", "step-2"}) save(state_of(""), base / name, group);
  const auto manager = std::make_shared<CheckpointManager>(base / "managed", group);
  return {
      {"save",
       {"another directory", "a null storage", "another format", "another dialect", "a state that is not flattened",
        "one name twice", "a sparse tensor", "another shape", "another dtype"},
       [base](const ProcessGroup& g, const std::string& mistake) {
         SaveOptions options;
         if (mistake == "another format") options.format = checkpoint::SaveFormat::safetensors_shards;
         if (mistake == "another dialect") options.dialect = dcp::Dialect::torch_1_13;
         options.flatten_state_dict = mistake != "a state that is not flattened";
         if (mistake == "a null storage") {
           save(state_of(mistake), std::shared_ptr<checkpoint::Storage>(), g, options);
         } else {
           save(state_of(mistake), directory_of(base, mistake), g, options);
         }
       }},
      {"load",
       {"another directory", "a null storage", "a name that is not saved", "another shape", "another dtype",
        "a node group"},
       [base](const ProcessGroup& g, const std::string& mistake) {
         StateDict state = state_of(mistake);
         LoadOptions options;
         if (mistake == "a node group") options.node_group = g;
         if (mistake == "a null storage") {
           load(state, std::shared_ptr<checkpoint::Storage>(), g, options);
         } else {
           load(state, directory_of(base, mistake), g, options);
         }
       }},
      {"make an AsyncSaver",
       {"another choice when busy", "another time to throw"},
       [](const ProcessGroup& g, const std::string& mistake) {
         AsyncSaveOptions options;
         if (mistake == "another choice when busy") options.when_busy = AsyncSaveOptions::WhenBusy::refuse;
         options.throw_at_next_call = mistake != "another time to throw";
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
