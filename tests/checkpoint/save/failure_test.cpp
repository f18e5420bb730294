// Fails each step of a save in turn, and kills processes while they save: the storage always holds the complete old or
// the complete new checkpoint.

#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>

#include "checkpoint/save/lossy_storage.h"
#include "checkpoint/save/saved_states.h"
#include "support/chaos.h"
#include "support/child_process.h"
#include "support/temporary_directory.h"
#include "support/thread_ranks.h"
#include "tessera/checkpoint/faulty_storage.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"
#include "tessera/checkpoint/sidecar.h"
#include "tessera/checkpoint/verify.h"

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
using ::testing::HasSubstr;

const Shape kShape = {40, 30};

FlatState state_of(int rank, int ranks, std::int64_t added) {
  return {tensor_entry("rows", kShape, layouts()[0].boxes(kShape, rank, ranks), false, added),
          tensor_entry("columns", kShape, layouts()[1].boxes(kShape, rank, ranks), false, added),
          tensor_entry("replicated", kShape, {Box::full(kShape)}, false, added), object_entry("step", added)};
}

// Compares every element and returns which save the checkpoint is of, or -1.
std::int64_t loaded(const std::shared_ptr<const Checkpoint>& checkpoint) {
  for (const std::int64_t added : {1000, 2000}) {
    Wanted wanted;
    for (const char* name : {"rows", "columns", "replicated"}) wanted.add(name, kShape, {Box::full(kShape)});
    read_state(wanted.targets, checkpoint);
    if (wanted.is_right(added)) return added;
  }
  return -1;
}

std::map<std::string, Bytes> contents_of(const Storage& storage) {
  std::map<std::string, Bytes> contents;
  for (const std::string& name : storage.list()) contents[name] = read_file(storage, name);
  return contents;
}

constexpr int kRanks = 3;

// Returns the steps of a save over an older checkpoint, in the order of one run.
std::vector<StorageStep> steps_of_a_save() {
  const auto storage = memory_storage();
  run_thread_ranks(kRanks, [&](ThreadLink& link) { write_state(state_of(link.rank(), kRanks, 1000), storage, link); });
  std::mutex mutex;
  std::vector<StorageStep> steps;
  const auto watched = faulty_storage(storage, [&](const StorageEvent& event) {
    const std::lock_guard lock(mutex);
    steps.push_back(event.step);
    return StorageFault::none;
  });
  run_thread_ranks(kRanks, [&](ThreadLink& link) { write_state(state_of(link.rank(), kRanks, 2000), watched, link); });
  return steps;
}

class SaveFaultTest : public ::testing::TestWithParam<std::tuple<bool, StorageFault>> {};
INSTANTIATE_TEST_SUITE_P(Faults, SaveFaultTest,
                         ::testing::Combine(::testing::Bool(),
                                            ::testing::Values(StorageFault::io_error, StorageFault::short_write)));

TEST_P(SaveFaultTest, EveryStepFailingIsAnErrorOnEveryRankAndTheOldCheckpointIsIntact) {
  const auto [has_old, fault] = GetParam();
  const std::size_t steps = steps_of_a_save().size();
  ASSERT_GT(steps, 20u);
  std::size_t failed = 0;
  for (std::uint64_t n = 0; n < steps; ++n) {
    const auto storage = memory_storage();
    if (has_old) {
      run_thread_ranks(kRanks,
                       [&](ThreadLink& link) { write_state(state_of(link.rank(), kRanks, 1000), storage, link); });
    }
    const auto before = contents_of(*storage);
    std::atomic<int> failing = -1;
    const auto faulty = faulty_storage(storage, [&, fault = fault](const StorageEvent& event) {
      const bool counts = event.number == n && event.step != StorageStep::remove;
      if (counts) failing = static_cast<int>(event.step);
      return counts ? fault : StorageFault::none;
    });
    const auto errors = run_thread_ranks(
        kRanks, [&](ThreadLink& link) { write_state(state_of(link.rank(), kRanks, 2000), faulty, link); });
    if (failing == -1) continue;  // the save has no such step, or it is a removal
    const auto step = static_cast<StorageStep>(failing.load());
    SCOPED_TRACE(fmt::format("event {}: {}", n, storage_step_name(step)));
    const bool is_committed = storage->size_bytes(".metadata") && loaded(Checkpoint::open(storage)) == 2000;
    if (is_committed) {
      // Listing the files to remove, after the commit.
      EXPECT_THAT(errors, Each(""));
      EXPECT_EQ(step, StorageStep::list);
      continue;
    }
    ++failed;
    for (const std::string& one : errors) {
      EXPECT_THAT(one, HasSubstr("io: "));
      EXPECT_THAT(one, HasSubstr(fmt::format("{} ", storage_step_name(step))));
    }
    EXPECT_EQ(contents_of(*storage), before);
  }
  EXPECT_GT(failed, 15u);
}

// --- failing for good

enum class Thrown { error, another_exception };

// Saves `kRanks` ranks' state over `storage`; on the ranks in `where`, calls of `step` (of all steps if nothing) fail
// from call `n` of that rank on. Returns the ranks' errors, and whether any call failed.
std::pair<std::vector<std::string>, bool> save_failing_from(const std::shared_ptr<Storage>& storage,
                                                            const std::set<int>& where, std::optional<StorageStep> step,
                                                            std::uint64_t n, Thrown thrown) {
  std::atomic<bool> any = false;
  std::vector<std::shared_ptr<Storage>> views;
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto calls = std::make_shared<std::atomic<std::uint64_t>>(0);
    views.push_back(faulty_storage(storage, [&any, &where, step, n, thrown, rank, calls](const StorageEvent& event) {
      if (!where.contains(rank) || (step && event.step != *step)) return StorageFault::none;
      if (calls->fetch_add(1) < n) return StorageFault::none;
      any = true;
      if (thrown == Thrown::another_exception) throw std::runtime_error("failed on command");
      return StorageFault::io_error;
    }));
  }
  std::vector<std::string> errors = run_thread_ranks(kRanks, [&](ThreadLink& link) {
    write_state(state_of(link.rank(), kRanks, 2000), views[static_cast<std::size_t>(link.rank())], link);
  });
  return {std::move(errors), any};
}

// Which save is in the storage: its checkpoint must be complete, whatever sidecar belongs to it.
std::int64_t found_in(const std::shared_ptr<Storage>& storage) { return loaded(Checkpoint::open(storage)); }

const std::vector<std::optional<StorageStep>> kSteps = {std::nullopt,        StorageStep::create, StorageStep::write,
                                                        StorageStep::finish, StorageStep::rename, StorageStep::remove,
                                                        StorageStep::sync,   StorageStep::open,   StorageStep::list};

// Numbers of saves, and of those after which the old or the new checkpoint is there.
struct Outcomes {
  std::size_t cases = 0, old_ones = 0, new_ones = 0;
};

Outcomes save_failing_everywhere(const std::vector<std::set<int>>& places, Thrown thrown) {
  Outcomes outcomes;
  for (const std::set<int>& where : places) {
    for (const auto& step : kSteps) {
      for (std::uint64_t n = 0;; n += ::tessera::testing::stride_if_sanitized(3)) {
        const auto storage = memory_storage();
        run_thread_ranks(kRanks,
                         [&](ThreadLink& link) { write_state(state_of(link.rank(), kRanks, 1000), storage, link); });
        const auto [errors, any] = save_failing_from(storage, where, step, n, thrown);
        if (!any) break;
        SCOPED_TRACE(fmt::format("{} ranks from {} on, {} from call {} on", where.size(), *where.begin(),
                                 step ? storage_step_name(*step) : "all steps", n));
        ++outcomes.cases;
        const std::int64_t found = found_in(storage);
        EXPECT_TRUE(found == 1000 || found == 2000);
        ++(found == 1000 ? outcomes.old_ones : outcomes.new_ones);
        const bool is_error = !errors[0].empty();
        for (const std::string& error : errors) {
          EXPECT_EQ(!error.empty(), is_error);
          if (is_error) {
            EXPECT_THAT(error, HasSubstr("rank "));
          }
        }
        EXPECT_TRUE(is_error || found == 2000);
        if (is_error && found == 2000) {
          EXPECT_THAT(errors[1], HasSubstr("no file of either was removed"));
        }
        // The next save succeeds, and nothing is left over.
        const auto next = run_thread_ranks(
            kRanks, [&](ThreadLink& link) { write_state(state_of(link.rank(), kRanks, 1000), storage, link); });
        EXPECT_THAT(next, Each(""));
        EXPECT_EQ(found_in(storage), 1000);
        const std::vector<std::string> names = storage->list();
        EXPECT_EQ(names.size(), 5u) << fmt::format("{}", fmt::join(names, " "));
        if (::testing::Test::HasFailure()) return outcomes;
      }
    }
  }
  fmt::print("{} cases: {} times the old checkpoint, {} times the new one\n", outcomes.cases, outcomes.old_ones,
             outcomes.new_ones);
  return outcomes;
}

TEST(SaveFailingForGoodTest, LeavesTheOldCheckpointOrTheNewOne) {
  const Outcomes outcomes = save_failing_everywhere({{0}, {1}, {0, 1, 2}}, Thrown::error);
  EXPECT_GT(outcomes.cases, 100 / ::tessera::testing::stride_if_sanitized(3));
  EXPECT_GT(outcomes.new_ones, 5 / ::tessera::testing::stride_if_sanitized(3));
}

TEST(SaveFailingForGoodTest, WithExceptionsOfAnotherTypeLeavesTheOldCheckpointOrTheNewOne) {
  const Outcomes outcomes = save_failing_everywhere({{0}}, Thrown::another_exception);
  EXPECT_GT(outcomes.old_ones, 5u);
  EXPECT_GT(outcomes.new_ones, 1u);
}

// --- on a machine that crashes

// After every call of a save, and after every call of the undo when calls fail for good, the machine crashes: any part
// of what was not synced is lost.
TEST(SaveCrashTest, OfStorageThatLosesWhatWasNotSyncedTheOldCheckpointOrTheNewOneIsLeft) {
  std::mt19937 random(1);
  std::size_t crashes = 0, old_ones = 0, new_ones = 0;
  const auto check = [&](const std::shared_ptr<Storage>& left, bool has_old) {
    ++crashes;
    if (!has_old && !left->size_bytes(".metadata")) return;
    const std::int64_t found = found_in(left);
    ASSERT_TRUE((has_old && found == 1000) || found == 2000);
    ++(found == 1000 ? old_ones : new_ones);
  };
  for (const bool has_old : {true, false}) {
    // Failing from call `from` on; the first round has no failures.
    for (std::uint64_t from = UINT64_MAX; from == UINT64_MAX || from < 40; from = from == UINT64_MAX ? 0 : from + 1) {
      const auto storage = std::make_shared<LossyStorage>();
      if (has_old) {
        run_thread_ranks(kRanks,
                         [&](ThreadLink& link) { write_state(state_of(link.rank(), kRanks, 1000), storage, link); });
      }
      std::atomic<std::uint64_t> calls_of_first = 0;
      std::size_t calls = 0;
      const auto crash_everywhere = [&] {
        if (calls++ % ::tessera::testing::stride_if_sanitized(11) != 0) return;
        for (const bool all : {false, true}) check(storage->after_crash([all](std::size_t) { return all; }), has_old);
        for (int i = 0; i < 4 * ::tessera::testing::chaos_factor(); ++i) {
          check(storage->after_crash([&](std::size_t) { return random() % 2 == 0; }), has_old);
        }
      };
      // Rank 0 alone writes the commit; of the others' data files any part may be there.
      std::mutex mutex;
      run_thread_ranks(kRanks, [&](ThreadLink& link) {
        const auto watched = faulty_storage(storage, [&, rank = link.rank()](const StorageEvent& event) {
          const std::lock_guard lock(mutex);
          crash_everywhere();
          const bool may_fail = event.step == StorageStep::sync || event.step == StorageStep::rename ||
                                event.step == StorageStep::finish || event.step == StorageStep::create;
          if (rank != 0 || !may_fail) return StorageFault::none;
          return calls_of_first++ >= from ? StorageFault::io_error : StorageFault::none;
        });
        write_state(state_of(link.rank(), kRanks, 2000), watched, link);
      });
      crash_everywhere();
      if (::testing::Test::HasFatalFailure()) return;
      if (from != UINT64_MAX && calls_of_first <= from) break;
    }
  }
  fmt::print("{} crashes: {} times the old checkpoint, {} times the new one\n", crashes, old_ones, new_ones);
  EXPECT_GT(crashes, 1000 / ::tessera::testing::stride_if_sanitized(11));
  EXPECT_GT(old_ones, 500 / ::tessera::testing::stride_if_sanitized(11));
  EXPECT_GT(new_ones, 100 / ::tessera::testing::stride_if_sanitized(11));
}

// --- on a full disk

// A disk in memory, mounted in a mount namespace of this process: gone with it.
class SmallDisk {
 public:
  // Returns false if the right to mount is missing.
  bool mount() {
    if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return false;
    return ::mount("none", path().c_str(), "tmpfs", 0, "size=64m") == 0;
  }
  // Leaves `pages` free pages and `files` free inodes.
  void leave_free(std::uint64_t pages, std::uint64_t files) {
    const struct statvfs now = status();
    resize(now.f_blocks - now.f_bfree + pages, now.f_files - now.f_ffree + files);
  }
  void enlarge() { resize(16384, 1024); }
  std::set<std::string> names() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path())) names.insert(entry.path());
    return names;
  }
  std::filesystem::path path() const { return temporary_.path(); }

 private:
  struct statvfs status() const {
    struct statvfs status {};
    EXPECT_EQ(::statvfs(path().c_str(), &status), 0);
    return status;
  }
  void resize(std::uint64_t pages, std::uint64_t files) {
    const std::string options = fmt::format("size={},nr_inodes={}", pages * status().f_bsize, files);
    EXPECT_EQ(::mount("none", path().c_str(), "tmpfs", MS_REMOUNT, options.c_str()), 0) << options;
  }

  TemporaryDirectory temporary_;
};

TEST(SaveOnAFullDiskTest, AtEveryFillTheOldCheckpointIsIntactAndTheNextSaveSucceeds) {
  SmallDisk disk;
  if (!disk.mount()) GTEST_SKIP() << "no right to mount: no full disk was tested";
  const auto save = [&](std::int64_t added) {
    return run_thread_ranks(kRanks, [&](ThreadLink& link) {
      write_state(state_of(link.rank(), kRanks, added), file_system_storage(disk.path() / "ckpt"), link);
    });
  };
  std::size_t full = 0;
  // Without space, but with inodes; then the other way round.
  for (const bool inodes : {false, true}) {
    bool fits = false;
    for (std::uint64_t free = 0; !fits; ++free) {
      ASSERT_LT(free, 1000u);
      SCOPED_TRACE(fmt::format("{} free {}", free, inodes ? "inodes" : "pages"));
      disk.enlarge();
      ASSERT_THAT(save(1000), Each(""));
      const std::set<std::string> before = disk.names();
      disk.leave_free(inodes ? 1000 : free, inodes ? free : 1000);
      const std::vector<std::string> errors = save(2000);
      fits = errors[0].empty();
      for (const std::string& error : errors) {
        EXPECT_EQ(error.empty(), fits);
        if (!fits) {
          EXPECT_THAT(error, AllOf(HasSubstr("rank "), HasSubstr("No space left on device")));
        }
      }
      ASSERT_EQ(loaded(Checkpoint::open(disk.path() / "ckpt")), fits ? 2000 : 1000);
      EXPECT_TRUE(verify(disk.path() / "ckpt").good());
      if (!fits) {
        ++full;
        EXPECT_EQ(disk.names(), before);
      }
    }
  }
  fmt::print("{} saves on a full disk\n", full);
  EXPECT_GT(full, 10u);
}

// --- killed

// Runs a save of `kRanks` threads in a process and kills it at event `n`, or after `after` if `n` is empty. Returns
// whether it was killed before it ended.
bool save_and_kill(const std::filesystem::path& directory, std::optional<std::uint64_t> n,
                   std::chrono::microseconds after) {
  const pid_t child = start_child([&] {
    const auto storage = faulty_storage(file_system_storage(directory), [&](const StorageEvent& event) {
      if (event.number == n) {
        ::kill(::getpid(), SIGKILL);
        std::this_thread::sleep_for(std::chrono::seconds(10));
      }
      return StorageFault::none;
    });
    run_thread_ranks(kRanks,
                     [&](ThreadLink& link) { write_state(state_of(link.rank(), kRanks, 2000), storage, link); });
  });
  if (!n) {
    std::this_thread::sleep_for(after);
    ::kill(child, SIGKILL);
  }
  return WIFSIGNALED(wait_for_child(child));
}

class Killed {
 public:
  // Restores the old checkpoint, which is made once and copied.
  void restore() {
    std::filesystem::remove_all(directory());
    if (!std::filesystem::exists(old_)) {
      run_thread_ranks(kRanks, [&](ThreadLink& link) {
        write_state(state_of(link.rank(), kRanks, 1000), file_system_storage(old_), link);
      });
    }
    std::filesystem::copy(old_, directory());
  }
  // Verifies the checkpoint and returns which save it is of.
  std::int64_t look() {
    const VerifyReport report = verify(directory());
    EXPECT_TRUE(report.good()) << report.problems.at(0).what;
    EXPECT_TRUE(report.has_sidecar);
    return loaded(Checkpoint::open(directory()));
  }
  // The next save succeeds and removes leftovers.
  void save_again() {
    run_thread_ranks(kRanks, [&](ThreadLink& link) {
      write_state(state_of(link.rank(), kRanks, 1000), file_system_storage(directory()), link);
    });
    const VerifyReport report = verify(directory());
    EXPECT_TRUE(report.good());
    EXPECT_TRUE(report.left_over.empty());
  }
  std::filesystem::path directory() const { return temporary_ / "ckpt"; }

 private:
  TemporaryDirectory temporary_;
  std::filesystem::path old_ = temporary_ / "old";
};

TEST(SaveKilledTest, AtEveryStepTheOldCheckpointOrTheNewOneIsWhole) {
  const std::size_t steps = steps_of_a_save().size();
  Killed killed;
  std::size_t old_ones = 0, new_ones = 0;
  for (std::uint64_t n = 0; n < steps + 2; ++n) {
    SCOPED_TRACE(n);
    killed.restore();
    if (!save_and_kill(killed.directory(), n, {})) continue;
    const std::int64_t found = killed.look();
    ASSERT_TRUE(found == 1000 || found == 2000);
    ++(found == 1000 ? old_ones : new_ones);
    killed.save_again();
  }
  EXPECT_GT(old_ones, 20u);
  EXPECT_GT(new_ones, 2u);
}

TEST(SaveKilledTest, AtRandomInstantsTheOldCheckpointOrTheNewOneIsWhole) {
  Killed killed;
  std::mt19937 random(1);
  killed.restore();
  const auto begin = std::chrono::steady_clock::now();
  save_and_kill(killed.directory(), std::uint64_t{1} << 60, {});
  const auto duration = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin);
  std::size_t old_ones = 0, new_ones = 0;
  const int kills =
      500 * ::tessera::testing::chaos_factor() / static_cast<int>(::tessera::testing::stride_if_sanitized(5));
  for (int i = 0; i < kills; ++i) {
    killed.restore();
    const std::chrono::microseconds after(
        std::uniform_int_distribution<std::int64_t>(0, duration.count() * 5 / 4)(random));
    save_and_kill(killed.directory(), std::nullopt, after);
    const std::int64_t found = killed.look();
    ASSERT_TRUE(found == 1000 || found == 2000) << "killed after " << after.count() << " us";
    ++(found == 1000 ? old_ones : new_ones);
  }
  EXPECT_GT(old_ones, 0u);
  EXPECT_GT(new_ones, 0u);
}

}  // namespace
}  // namespace tessera::checkpoint
