// Saves to one storage that overlap in time: each commits complete or throws, and one that throws changes nothing.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/save/overlapping_saves.h"
#include "checkpoint/save/saved_states.h"
#include "support/chaos.h"
#include "support/thread_ranks.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/faulty_storage.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"
#include "tessera/checkpoint/sidecar.h"

namespace tessera::checkpoint {
namespace {

using namespace saved;
using ::tessera::testing::run_thread_ranks;
using ::tessera::testing::ThreadLink;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Runs a save that begins first, writes its files, and commits before or after a second save is committed. Returns the
// errors of both. The second save begins after the first has written.
std::pair<std::string, std::string> overlapping_saves(const std::shared_ptr<Storage>& storage,
                                                      const WriteOptions& options, bool first_commits_first) {
  std::string first, second;
  if (!first_commits_first) {
    first = overlapping_save(storage, 1000, options, [&] { second = overlapping_save(storage, 2000, options); });
    return {first, second};
  }
  std::promise<void> is_written, may_commit;
  std::thread thread([&] {
    first = overlapping_save(storage, 1000, options, [&] {
      is_written.set_value();
      may_commit.get_future().wait();
    });
  });
  is_written.get_future().wait();
  second = overlapping_save(storage, 2000, options, [&] {
    may_commit.set_value();
    thread.join();
  });
  if (thread.joinable()) {  // the second save failed early
    may_commit.set_value();
    thread.join();
  }
  return {first, second};
}

TEST(OverlappingSavesTest, OfDcpBothCommitInTheOrderInWhichTheyBegan) {
  for (const bool has_old : {true, false}) {
    const auto storage = memory_storage();
    if (has_old) {
      ASSERT_EQ(overlapping_save(storage, 1000, in_format(SaveFormat::dcp)), "");
    }
    const auto [first, second] = overlapping_saves(storage, in_format(SaveFormat::dcp), true);
    EXPECT_EQ(first, "");
    EXPECT_EQ(second, "");
    EXPECT_EQ(save_in(storage), 2000);
    EXPECT_EQ(storage->list().size(), 3u);
  }
}

TEST(OverlappingSavesTest, OfDcpTheFirstFailsIfTheSecondCommitsBefore) {
  for (const bool has_old : {true, false}) {
    const auto storage = memory_storage();
    if (has_old) {
      ASSERT_EQ(overlapping_save(storage, 1000, in_format(SaveFormat::dcp)), "");
    }
    const auto [first, second] = overlapping_saves(storage, in_format(SaveFormat::dcp), false);
    EXPECT_THAT(first, HasSubstr("found a checkpoint of a save that began later, expected none"));
    EXPECT_EQ(second, "");
    EXPECT_EQ(save_in(storage), 2000);
    EXPECT_EQ(storage->list().size(), 3u);
  }
}

TEST(OverlappingSavesTest, OfDcpTheFirstFailsIfTheSecondWithoutDataFilesCommitsBefore) {
  const auto storage = memory_storage();
  std::string second;
  FileContents committed;
  const std::string first = overlapping_save(storage, 1000, in_format(SaveFormat::dcp), [&] {
    second = overlapping_save(storage, FlatState(), in_format(SaveFormat::dcp));
    committed = contents_in(*storage);
  });
  EXPECT_EQ(second, "");
  EXPECT_THAT(first, HasSubstr("found a checkpoint of a save that began later, expected none"));
  EXPECT_EQ(contents_in(*storage), committed);
  EXPECT_THAT(storage->list(), ElementsAre(".metadata", ".tessera.json"));
}

TEST(OverlappingSavesTest, OfDcpTheFirstFailsIfItsCoordinatorAndTheSecondHaveNoDataFiles) {
  const auto storage = memory_storage();
  std::string second;
  const std::vector<std::string> first = run_thread_ranks(2, [&](ThreadLink& link) {
    WriteOptions options = in_format(SaveFormat::dcp);
    std::vector<Box> boxes;
    if (link.rank() == 1) {
      boxes.push_back(Box::full(kSavedShape));
      options.before_commit = [&] { second = overlapping_save(storage, FlatState(), in_format(SaveFormat::dcp)); };
    }
    write_state({tensor_entry("a", kSavedShape, boxes)}, storage, link, options);
  });
  EXPECT_EQ(second, "");
  EXPECT_THAT(first, Each(HasSubstr("found a checkpoint of a save that began later, expected none")));
  EXPECT_THAT(storage->list(), ElementsAre(".metadata", ".tessera.json"));
}

// The disk of rank 0 shows the names of its own files only.
TEST(OverlappingSavesTest, OfDcpOnDisksOfTheRanksTheFirstFailsIfTheSecondCommitsBefore) {
  const std::vector<std::shared_ptr<Storage>> disks = {memory_storage(), memory_storage()};
  const auto save = [&](int rank_with_data, std::function<void()> before_commit_of_0 = nullptr) {
    return run_thread_ranks(2, [&](ThreadLink& link) {
      WriteOptions options = in_format(SaveFormat::dcp);
      if (link.rank() == 0) options.before_commit = before_commit_of_0;
      std::vector<Box> boxes;
      if (link.rank() == rank_with_data) boxes.push_back(Box::full(kSavedShape));
      write_state({tensor_entry("a", kSavedShape, boxes)}, disks[static_cast<std::size_t>(link.rank())], link, options);
    });
  };
  for (int i = 0; i < 2; ++i) EXPECT_THAT(save(1), Each(""));
  std::vector<std::string> second;
  EXPECT_THAT(save(0, [&] { second = save(1); }), Each(HasSubstr("of a save that began later, expected none")));
  EXPECT_THAT(second, Each(""));
  EXPECT_THAT(disks[0]->list(), ElementsAre(".metadata", ".tessera.json"));
  EXPECT_THAT(disks[1]->list(), Contains("__1_0.3.distcp"));
}

TEST(OverlappingSavesTest, OfDcpWithoutOverwriteTheSecondFailsIfTheFirstCommitsBefore) {
  const auto storage = memory_storage();
  WriteOptions options = in_format(SaveFormat::dcp);
  options.overwrite = false;
  const auto [first, second] = overlapping_saves(storage, options, true);
  EXPECT_EQ(first, "");
  EXPECT_THAT(second, HasSubstr("commit to memory: found a checkpoint, expected none, because overwrite is false"));
  EXPECT_EQ(save_in(storage), 1000);
  EXPECT_EQ(storage->list().size(), 3u);
}

TEST(OverlappingSavesTest, OfSafetensorsShardsOnlyTheSecondCommits) {
  for (const bool first_commits_first : {true, false}) {
    const auto storage = memory_storage();
    const auto [first, second] =
        overlapping_saves(storage, in_format(SaveFormat::safetensors_shards), first_commits_first);
    EXPECT_THAT(first, HasSubstr(first_commits_first ? "is no longer there, expected the file that this save wrote"
                                                     : "expected no checkpoint"));
    EXPECT_EQ(second, "");
    EXPECT_EQ(save_in(storage), 2000);
  }
}

// Two saves begin before either writes, and their shards have different names. One is committed after the other has
// written its sidecar and before that renames its shard.
TEST(OverlappingSavesTest, OfSafetensorsShardsWithOtherNamesOnlyOneCommits) {
  const auto storage = memory_storage();
  std::promise<void> has_sidecar, may_continue;
  std::string first, second;
  std::thread thread;
  const auto save_first = [&] {
    int renames = 0;
    const auto slow = faulty_storage(storage, [&](const StorageEvent& event) {
      if (event.step == StorageStep::rename && ++renames == 2) {
        has_sidecar.set_value();
        may_continue.get_future().wait();
      }
      return StorageFault::none;
    });
    first = overlapping_save(slow, 1000, in_format(SaveFormat::safetensors_shards, 1));
    if (renames < 2) has_sidecar.set_value();
  };
  const auto watched = faulty_storage(storage, [&](const StorageEvent& event) {
    if (event.step == StorageStep::create && !thread.joinable()) {
      thread = std::thread(save_first);
      has_sidecar.get_future().wait();
    }
    return StorageFault::none;
  });
  second = overlapping_save(watched, 2000, in_format(SaveFormat::safetensors_shards, 2));
  may_continue.set_value();
  thread.join();
  EXPECT_EQ(first, "");
  EXPECT_THAT(second, HasSubstr("found shards that another save is committing, expected none"));
  EXPECT_EQ(save_in(storage), 1000);
  EXPECT_EQ(storage->list().size(), 2u);
}

TEST(OverlappingSavesTest, OnlyOneIsCommittedAtATime) {
  for (const SaveFormat format : {SaveFormat::dcp, SaveFormat::safetensors_shards}) {
    const auto storage = memory_storage();
    const std::string temporary = ".tessera.json.tmp";
    const std::string error =
        overlapping_save(storage, 2000, in_format(format), [&] { write_new_file(*storage, temporary, {}); });
    EXPECT_THAT(error, HasSubstr("found .tessera.json.tmp, expected none: another save is being committed"));
    EXPECT_EQ(storage->list(), std::vector<std::string>{temporary});
    // What was there when a save began was left by a save that was killed.
    EXPECT_EQ(overlapping_save(storage, 2000, in_format(format)), "");
    EXPECT_EQ(save_in(storage), 2000);
    EXPECT_FALSE(storage->size_bytes(temporary));
  }
}

// `tessera sum` began to write it while the save was running.
TEST(OverlappingSavesTest, OfDcpTheTemporarySidecarOfSumGivesWay) {
  const auto storage = memory_storage();
  ASSERT_EQ(overlapping_save(storage, 1000, in_format(SaveFormat::dcp)), "");
  const Sidecar sidecar = read_sidecar(*storage).value();
  storage->remove(".tessera.json");
  EXPECT_EQ(overlapping_save(storage, 2000, in_format(SaveFormat::dcp),
                             [&] { write_new_file(*storage, ".tessera.json.tmp", write_sidecar(sidecar)); }),
            "");
  EXPECT_EQ(save_in(storage), 2000);
  EXPECT_EQ(contents_in(*storage), contents_of_checkpoint(*storage));
}

TEST(OverlappingSavesTest, OfDcpUncommittedMetadataOfAnotherSaveIsNotRemoved) {
  const auto storage = memory_storage();
  const std::string error = overlapping_save(storage, 2000, in_format(SaveFormat::dcp),
                                             [&] { write_new_file(*storage, ".metadata.tmp", {}); });
  EXPECT_THAT(error, HasSubstr(".metadata.tmp: the file exists, expected a new name"));
  EXPECT_THAT(storage->list(), ElementsAre(".metadata.tmp"));
}

// --- a save between any two calls of another

// What is there before both saves.
struct Before {
  SaveFormat format = SaveFormat::dcp;
  bool has_checkpoint = false;
  bool has_empty_sidecar = false;          // a temporary one
  std::optional<int> renames_of_a_killed;  // a save was killed after so many renames
};

std::vector<Before> all_before(bool with_killed) {
  std::vector<Before> all;
  for (const SaveFormat format : {SaveFormat::dcp, SaveFormat::safetensors_shards}) {
    for (const bool has_checkpoint : {false, true}) {
      if (has_checkpoint && format == SaveFormat::safetensors_shards) continue;
      all.push_back({format, has_checkpoint, false, std::nullopt});
      if (!with_killed) continue;
      all.push_back({format, has_checkpoint, true, std::nullopt});
      const int commits = format == SaveFormat::dcp ? 2 : 3;
      for (int renames = 0; renames < commits; ++renames) all.push_back({format, has_checkpoint, false, renames});
    }
  }
  return all;
}

FileContents contents_before(const Before& before) {
  const auto storage = memory_storage();
  const WriteOptions options = in_format(before.format, 2);
  if (before.has_checkpoint) {
    EXPECT_EQ(overlapping_save(storage, 3000, options), "");
  }
  if (before.has_empty_sidecar) write_new_file(*storage, ".tessera.json.tmp", {});
  if (before.renames_of_a_killed) {
    int renames = 0;
    const auto killed = faulty_storage(storage, [&](const StorageEvent& event) {
      if (event.step == StorageStep::rename) ++renames;
      return renames > *before.renames_of_a_killed ? StorageFault::io_error : StorageFault::none;
    });
    EXPECT_NE(overlapping_save(killed, 4000, options), "");
  }
  return contents_in(*storage);
}

struct TwoSaves {
  bool is_overlap = false;    // whether the first had such a call
  std::string first, second;  // errors
  StorageStep failed = StorageStep::prepare;
};

// Runs a save whose call `fails` fails, if it is not empty. Before its call `n`, runs another save, from begin to end.
// Expects what must hold for any `n`.
TwoSaves save_within_a_save(const Before& before, const FileContents& files, std::uint64_t n,
                            std::optional<std::uint64_t> fails = std::nullopt) {
  const auto storage = memory_storage();
  for (const auto& [name, contents] : files) write_new_file(*storage, name, contents);
  const WriteOptions options = in_format(before.format, 2);
  TwoSaves result;
  FileContents committed;
  std::mutex mutex;  // a thread of the first save waits for the second save
  const auto watched = faulty_storage(storage, [&](const StorageEvent& event) {
    const std::lock_guard lock(mutex);
    if (event.number == n) {
      result.is_overlap = true;
      result.second = overlapping_save(storage, 2000, options);
      if (result.second.empty()) committed = contents_of_checkpoint(*storage);
    }
    if (event.number != fails) return StorageFault::none;
    result.failed = event.step;
    return StorageFault::io_error;
  });
  result.first = overlapping_save(watched, 1000, options);
  if (!result.is_overlap) return result;
  if (!result.first.empty() && result.second.empty()) {
    EXPECT_EQ(contents_in(*storage), committed);
    EXPECT_EQ(save_in(storage), 2000);
  } else if (result.first.empty()) {
    const std::int64_t found = save_in(storage);
    EXPECT_TRUE(found == 1000 || (found == 2000 && result.second.empty())) << found;
    EXPECT_EQ(contents_in(*storage), contents_of_checkpoint(*storage));
  } else {
    EXPECT_TRUE(fails) << result.first << "; " << result.second;
  }
  // Shards do not replace a checkpoint.
  if (before.format == SaveFormat::safetensors_shards) {
    EXPECT_TRUE(!result.first.empty() || !result.second.empty());
  } else {
    EXPECT_EQ(result.second, "");
  }
  return result;
}

TEST(SaveWithinASaveTest, BetweenAnyTwoCallsEachCommitsCompleteOrChangesNothing) {
  std::size_t overlaps = 0, failed = 0;
  for (const Before& before : all_before(/*with_killed=*/true)) {
    const FileContents files = contents_before(before);
    for (std::uint64_t n = 0;; n += ::tessera::testing::stride_if_sanitized(3)) {
      SCOPED_TRACE(fmt::format("format {}, checkpoint {}, empty sidecar {}, killed {}, call {}",
                               static_cast<int>(before.format), before.has_checkpoint, before.has_empty_sidecar,
                               before.renames_of_a_killed.value_or(-1), n));
      const TwoSaves saves = save_within_a_save(before, files, n);
      if (!saves.is_overlap) break;
      ++overlaps;
      failed += saves.first.empty() ? 0 : 1;
      if (::testing::Test::HasFailure()) FAIL() << "first: " << saves.first << "\nsecond: " << saves.second;
    }
  }
  fmt::print("{} saves within a save, which failed {} times\n", overlaps, failed);
  EXPECT_GT(failed, 200 / ::tessera::testing::stride_if_sanitized(3));
}

// The first save fails by itself, too, and the second one runs while it undoes what it did.
TEST(SaveWithinASaveTest, WhileAFailedSaveIsUndoneItIsCompleteToo) {
  std::size_t overlaps = 0, undone = 0;
  for (const Before& before : all_before(/*with_killed=*/false)) {
    const FileContents files = contents_before(before);
    for (std::uint64_t fails = 0;; fails += ::tessera::testing::stride_if_sanitized(5)) {
      const TwoSaves only_first = save_within_a_save(before, files, UINT64_MAX, fails);
      if (only_first.failed == StorageStep::prepare) {
        if (fails == 0) continue;
        break;
      }
      if (only_first.failed != StorageStep::rename && only_first.failed != StorageStep::sync) continue;
      for (std::uint64_t n = fails + 1;; ++n) {
        SCOPED_TRACE(fmt::format("format {}, checkpoint {}, call {} fails, call {}", static_cast<int>(before.format),
                                 before.has_checkpoint, fails, n));
        const TwoSaves saves = save_within_a_save(before, files, n, fails);
        if (!saves.is_overlap) break;
        ++overlaps;
        undone += saves.second.empty() ? 1 : 0;
        if (::testing::Test::HasFailure()) FAIL() << "first: " << saves.first << "\nsecond: " << saves.second;
      }
    }
  }
  fmt::print("{} saves while another was undone\n", overlaps);
  EXPECT_GT(undone, 50 / ::tessera::testing::stride_if_sanitized(5));
}

// The second save begins before call `n` of the first one, and pauses before its own call `m` until the first one has
// ended. Returns whether both had such calls.
bool save_pausing_within_a_save(const Before& before, const FileContents& files, std::uint64_t n, std::uint64_t m) {
  const auto storage = memory_storage();
  for (const auto& [name, contents] : files) write_new_file(*storage, name, contents);
  const WriteOptions options = in_format(before.format, 2);
  std::promise<void> has_paused, may_continue;
  bool pauses = false;
  std::string first, second;
  std::thread thread;
  std::mutex mutex, mutex_of_second;
  const auto save_second = [&] {
    const auto pausing = faulty_storage(storage, [&](const StorageEvent& event) {
      const std::lock_guard lock(mutex_of_second);
      if (event.number == m) {
        pauses = true;
        has_paused.set_value();
        may_continue.get_future().wait();
      }
      return StorageFault::none;
    });
    second = overlapping_save(pausing, 2000, options);
    if (!pauses) has_paused.set_value();
  };
  const auto watched = faulty_storage(storage, [&](const StorageEvent& event) {
    const std::lock_guard lock(mutex);
    if (event.number == n) {
      thread = std::thread(save_second);
      has_paused.get_future().wait();
    }
    return StorageFault::none;
  });
  first = overlapping_save(watched, 1000, options);
  if (!thread.joinable()) return false;
  may_continue.set_value();
  thread.join();
  for (const std::string& error : {first, second}) EXPECT_THAT(error, AnyOf("", StartsWith("invalid_argument: ")));
  const bool replaces = before.format == SaveFormat::dcp;
  if (first.empty() || second.empty() || before.has_checkpoint) {
    const std::int64_t found = save_in(storage);
    EXPECT_NE(found, -1);
    // The outcome of a save that another one took over is not known.
    const bool may_be_second = second.empty() || second.find("another save to memory took over") != std::string::npos;
    EXPECT_TRUE(!first.empty() || found == 1000 || (may_be_second && found == 2000)) << found;
    EXPECT_TRUE(!second.empty() || found == 2000 || (first.empty() && found == 1000)) << found;
  }
  if (replaces || (!first.empty() && !second.empty())) {
    EXPECT_EQ(overlapping_save(storage, 3000, options), "");
    EXPECT_EQ(save_in(storage), 3000);
  }
  if (::testing::Test::HasFailure()) fmt::print("first: {}\nsecond: {}\n", first, second);
  return pauses;
}

TEST(SaveWithinASaveTest, IfItPausesNoneIsLostThatReturnedWithoutAnError) {
  const std::uint64_t stride =
      37 / std::min<std::uint64_t>(37, static_cast<std::uint64_t>(::tessera::testing::chaos_factor()));
  std::size_t pauses = 0;
  for (const Before& before : all_before(/*with_killed=*/true)) {
    const FileContents files = contents_before(before);
    for (std::uint64_t n = 0; n < 40; n += ::tessera::testing::stride_if_sanitized(3)) {
      for (std::uint64_t m = n * 7 % stride; m < 40; m += stride) {
        SCOPED_TRACE(fmt::format("format {}, checkpoint {}, empty sidecar {}, killed {}, call {}, then call {}",
                                 static_cast<int>(before.format), before.has_checkpoint, before.has_empty_sidecar,
                                 before.renames_of_a_killed.value_or(-1), n, m));
        pauses += save_pausing_within_a_save(before, files, n, m) ? 1 : 0;
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
  fmt::print("{} pauses\n", pauses);
  EXPECT_GT(pauses, 200 / ::tessera::testing::stride_if_sanitized(3));
}

}  // namespace
}  // namespace tessera::checkpoint
