// Saves as safetensors shards: their contents, what is refused, and that an interrupted save leaves nothing that looks
// like a checkpoint.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "checkpoint/save/saved_states.h"
#include "support/chaos.h"
#include "support/child_process.h"
#include "support/temporary_directory.h"
#include "support/thread_ranks.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/faulty_storage.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/format/python_value.h"

namespace tessera::checkpoint {
namespace {

using namespace saved;
using ::tessera::testing::run_thread_ranks;
using ::tessera::testing::start_child;
using ::tessera::testing::TemporaryDirectory;
using ::tessera::testing::ThreadLink;
using ::tessera::testing::wait_for_child;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

WriteOptions as_safetensors(std::size_t files_per_rank = 1) {
  WriteOptions options;
  options.format = SaveFormat::safetensors_shards;
  options.files_per_rank = files_per_rank;
  return options;
}

class SafetensorsSaveOnRanksTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, SafetensorsSaveOnRanksTest, ::testing::Range(1, 9));

TEST_P(SafetensorsSaveOnRanksTest, EveryLayoutInAnyNumberOfFilesLoadsOnAnyNumberOfRanks) {
  ::tessera::testing::SampleIfSanitized sample(3);
  for (const NamedLayout& layout : layouts()) {
    for (const std::size_t files : {std::size_t{1}, std::size_t{3}, std::size_t{0}}) {
      if (!sample.takes_next()) continue;
      SCOPED_TRACE(fmt::format("{}, {} files", layout.name, files));
      const TemporaryDirectory directory;
      const auto storage = file_system_storage(directory / "ckpt");
      EXPECT_THAT(save_on(GetParam(), layout.boxes, storage, as_safetensors(files)), Each(""));
      const VerifyReport report = verify(directory / "ckpt");
      EXPECT_TRUE(report.good()) << report.problems.at(0).what;
      EXPECT_TRUE(report.has_sidecar);
      EXPECT_THAT(report.left_over, ElementsAre());
      for (const int ranks : {1, 3}) expect_loads_on(ranks, layouts()[1].boxes, storage);
    }
  }
}

TEST(SafetensorsSaveTest, FilesAreCalledAsPyTorchCallsThem) {
  const auto storage = memory_storage();
  EXPECT_THAT(save_on(2, layouts()[0].boxes, storage, as_safetensors()), Each(""));
  EXPECT_THAT(storage->list(), ElementsAre(".tessera.json", "shard-00001-model-00001-of-00001.safetensors",
                                           "shard-00002-model-00001-of-00001.safetensors"));
}

TEST(SafetensorsSaveTest, PlacesInTheStateDictAreKept) {
  const auto storage = memory_storage();
  const auto errors = run_thread_ranks(3, [&](ThreadLink& link) {
    FlatState state = state_of(layouts()[0].boxes, link.rank(), 3);
    for (StateEntry& entry : state) entry.path = {"model", entry.name};
    write_state(state, storage, link, as_safetensors());
  });
  EXPECT_THAT(errors, Each(""));
  const auto checkpoint = Checkpoint::open(storage);
  for (const TensorInfo& tensor : checkpoint->tensors()) {
    EXPECT_EQ(tensor.path, (Path{"model", tensor.name}));
  }
}

TEST(SafetensorsSaveTest, ADtypeThatSafetensorsLacksComesBack) {
  const auto storage = memory_storage();
  const Shape shape = {6, 4};
  const auto errors = run_thread_ranks(2, [&](ThreadLink& link) {
    StateEntry entry = tensor_entry("c", shape, layouts()[0].boxes(shape, link.rank(), 2));
    std::get<StateTensor>(entry.value).properties->dtype = DType::complex64;  // of equal size
    write_state({std::move(entry)}, storage, link, as_safetensors());
  });
  EXPECT_THAT(errors, Each(""));
  Wanted wanted;
  wanted.add("c", shape, {Box::full(shape)});
  std::get<TargetTensor>(wanted.targets[0].value).dtype = DType::complex64;
  read_state(wanted.targets, Checkpoint::open(storage));
  EXPECT_TRUE(wanted.is_right());
}

TEST(SafetensorsSaveTest, ACheckpointIsNotReplaced) {
  for (const SaveFormat old : {SaveFormat::dcp, SaveFormat::safetensors_shards}) {
    const auto storage = memory_storage();
    WriteOptions options;
    options.format = old;
    write_state(state_of(layouts()[3].boxes, 0, 1), storage, alone(), options);
    const std::vector<std::string> before = storage->list();
    EXPECT_THAT(save_on(2, layouts()[0].boxes, storage, as_safetensors()),
                Each(AllOf(HasSubstr("invalid_argument"), HasSubstr("safetensors shards cannot replace one"))));
    EXPECT_EQ(storage->list(), before);
    expect_loads_on(1, layouts()[1].boxes, storage);
  }
}

TEST(SafetensorsSaveTest, NothingIsTakenFromACheckpointThatLostAFile) {
  for (const SaveFormat old : {SaveFormat::dcp, SaveFormat::safetensors_shards}) {
    const auto storage = memory_storage();
    WriteOptions options;
    options.format = old;
    run_thread_ranks(3, [&](ThreadLink& link) {
      write_state(state_of(layouts()[0].boxes, link.rank(), 3), storage, link, options);
    });
    storage->remove(old == SaveFormat::dcp ? "__1_0.distcp" : "shard-00002-model-00001-of-00001.safetensors");
    const std::vector<std::string> before = storage->list();
    EXPECT_THAT(save_on(2, layouts()[0].boxes, storage, as_safetensors()),
                Each(HasSubstr("safetensors shards cannot replace one")));
    EXPECT_EQ(storage->list(), before);
  }
}

TEST(SafetensorsSaveTest, AnObjectThatJsonCannotSayIsRefusedAndNothingIsLeft) {
  const auto storage = memory_storage();
  const StateEntry opaque = {"callback", {"callback"}, StateObject{[] {
                               Bytes data_pkl;
                               pickle::Writer writer(data_pkl, 2);
                               writer.global("builtins", "print");
                               writer.stop();
                               return torch_archive::ArchiveLayout("archive", data_pkl, {}).trailer({});
                             }}};
  const auto errors = run_thread_ranks(2, [&](ThreadLink& link) {
    FlatState state = state_of(layouts()[0].boxes, link.rank(), 2);
    state.push_back(opaque);
    write_state(state, storage, link, as_safetensors());
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("unsupported"), HasSubstr("'callback'"), HasSubstr("print"))));
  EXPECT_THAT(storage->list(), ElementsAre());
}

// --- interrupted saves

constexpr int kRanks = 3;

TEST(SafetensorsSaveTest, EveryStepFailingIsAnErrorOnEveryRankAndNothingIsLeft) {
  std::size_t failed = 0;
  for (std::uint64_t n = 0;; ++n) {
    const auto storage = memory_storage();
    std::atomic<bool> was_reached = false;
    std::atomic<int> failing = -1;
    const auto faulty = faulty_storage(storage, [&](const StorageEvent& event) {
      was_reached = was_reached || event.number == n;
      const bool counts = event.number == n && event.step != StorageStep::remove;
      if (counts) failing = static_cast<int>(event.step);
      return counts ? StorageFault::io_error : StorageFault::none;
    });
    const auto errors = save_on(kRanks, layouts()[0].boxes, faulty, as_safetensors());
    if (!was_reached) break;
    if (failing == -1) continue;
    const auto step = static_cast<StorageStep>(failing.load());
    SCOPED_TRACE(fmt::format("event {}: {}", n, storage_step_name(step)));
    ++failed;
    EXPECT_THAT(errors, Each(AllOf(HasSubstr("io: "), HasSubstr(fmt::format("{} ", storage_step_name(step))))));
    EXPECT_THAT(storage->list(), ElementsAre());
  }
  EXPECT_GT(failed, 15u);
}

// Saves in a process that is killed at event `n`. Returns whether the save reached that event.
bool save_killed_at(std::uint64_t n, const std::filesystem::path& path, int ranks, const Layout& layout) {
  const pid_t child = start_child([&] {
    const auto storage = faulty_storage(file_system_storage(path), [&](const StorageEvent& event) {
      if (event.number == n) {
        ::kill(::getpid(), SIGKILL);
        std::this_thread::sleep_for(std::chrono::seconds(10));
      }
      return StorageFault::none;
    });
    save_on(ranks, layout, storage, as_safetensors());
  });
  return WIFSIGNALED(wait_for_child(child));
}

TEST(SafetensorsSaveTest, KilledAtAnyStepItLeavesTheWholeCheckpointOrNoneThatOpens) {
  std::size_t none = 0, partial = 0, complete = 0;
  for (std::uint64_t n = 0;; ++n) {
    SCOPED_TRACE(n);
    const TemporaryDirectory directory;
    if (!save_killed_at(n, directory / "ckpt", kRanks, layouts()[0].boxes)) break;
    const auto storage = file_system_storage(directory / "ckpt");
    try {
      Checkpoint::open(storage);
      ++complete;
      expect_loads_on(1, layouts()[1].boxes, storage);
      EXPECT_TRUE(verify(directory / "ckpt").good());
      continue;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::not_found) {
        ++none;
      } else {
        ++partial;
        EXPECT_THAT(error.what(), HasSubstr("never completed"));
      }
    }
    EXPECT_THAT(save_on(2, layouts()[1].boxes, storage, as_safetensors()), Each(""));
    expect_loads_on(1, layouts()[1].boxes, storage);
    const VerifyReport report = verify(directory / "ckpt");
    EXPECT_TRUE(report.good());
    EXPECT_THAT(report.left_over, ElementsAre());
  }
  EXPECT_GT(none, 15u);
  EXPECT_EQ(partial, static_cast<std::size_t>(kRanks - 1));
  EXPECT_GT(complete, 0u);
}

// Interrupts the commit of a save, then kills saves while they remove its files.
TEST(SafetensorsSaveTest, KilledAtAnyStepOfCleaningUpTheNextSaveSucceeds) {
  const auto is_interrupted = [](const std::filesystem::path& path) {
    try {
      Checkpoint::open(file_system_storage(path));
      return false;
    } catch (const Error& error) {
      return std::string(error.what()).find("never completed") != std::string::npos;
    }
  };
  std::vector<std::uint64_t> interrupting;
  for (std::uint64_t n = 0; interrupting.size() < 2; ++n) {
    const TemporaryDirectory directory;
    ASSERT_TRUE(save_killed_at(n, directory / "ckpt", kRanks, layouts()[0].boxes));
    if (is_interrupted(directory / "ckpt")) interrupting.push_back(n);
  }
  for (const std::uint64_t first : interrupting) {
    for (std::uint64_t n = 0;; n += ::tessera::testing::stride_if_sanitized(3)) {
      SCOPED_TRACE(fmt::format("killed at {}, then at {}", first, n));
      const TemporaryDirectory directory;
      ASSERT_TRUE(save_killed_at(first, directory / "ckpt", kRanks, layouts()[0].boxes));
      if (!save_killed_at(n, directory / "ckpt", 2, layouts()[1].boxes)) break;
      const auto storage = file_system_storage(directory / "ckpt");
      if (const auto errors = save_on(2, layouts()[1].boxes, storage, as_safetensors());
          errors != std::vector<std::string>(2)) {
        EXPECT_THAT(errors, Each(HasSubstr("safetensors shards cannot replace one")));  // the second had completed
      }
      expect_loads_on(1, layouts()[1].boxes, storage);
      EXPECT_TRUE(verify(directory / "ckpt").good());
    }
  }
}

}  // namespace
}  // namespace tessera::checkpoint
