// Two saves that take turns at chosen calls. The first is slow or undoes itself, and the second takes over from it: the
// checkpoint of the second is complete, whatever the first was about to do.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/save/overlapping_saves.h"
#include "support/chaos.h"
#include "tessera/checkpoint/faulty_storage.h"
#include "tessera/checkpoint/sidecar.h"

namespace tessera::checkpoint {
namespace {

using namespace saved;
using ::testing::HasSubstr;
using ::testing::StartsWith;

using Call = std::function<bool(const StorageEvent&)>;  // whether it is that call

Call call(StorageStep step, std::string file = "") {
  return [step, file = std::move(file)](const StorageEvent& event) {
    return event.step == step && event.file.ends_with(file);
  };
}

// The first `second` after a call that is `first`.
Call after(Call first, Call second) {
  return [first = std::move(first), second = std::move(second), is_after = false](const StorageEvent& event) mutable {
    if (is_after) return second(event);
    is_after = first(event);
    return false;
  };
}

Call call_number(std::uint64_t number) {
  return [number](const StorageEvent& event) { return event.number == number; };
}

class Turns {
 public:
  void wait(int who) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return who_runs_ == who || has_ended_.at(static_cast<std::size_t>(1 - who)); });
  }
  void pass(int who) {
    give(1 - who);
    wait(who);
  }
  void end(int who) {
    {
      const std::lock_guard lock(mutex_);
      has_ended_.at(static_cast<std::size_t>(who)) = true;
    }
    give(1 - who);
  }

 private:
  void give(int who) {
    const std::lock_guard lock(mutex_);
    who_runs_ = who;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  int who_runs_ = 0;
  std::array<bool, 2> has_ended_{};
};

struct SaveInTurns {
  std::int64_t added = 0;
  std::vector<Call> stops;  // before these calls, in this order, it lets the other save run
  Call fails = nullptr;     // the first of these calls fails
};

struct Ends {
  std::string first, second;  // errors
  std::size_t stops = 0;      // that were reached
};

// Runs two saves. The second begins at the first stop of the first, and each runs to its next stop or its end.
Ends save_in_turns(const std::shared_ptr<Storage>& storage, SaveFormat format, SaveInTurns first, SaveInTurns second) {
  Turns turns;
  Ends ends;
  const auto run = [&](int who, SaveInTurns& save) {
    std::mutex mutex;
    std::size_t stops = 0;
    bool has_failed = false;
    const auto watched = faulty_storage(storage, [&](const StorageEvent& event) {
      const std::lock_guard lock(mutex);
      if (stops < save.stops.size() && save.stops[stops](event)) {
        ++stops;
        turns.pass(who);
      }
      if (!save.fails || has_failed || !save.fails(event)) return StorageFault::none;
      has_failed = true;
      return StorageFault::io_error;
    });
    std::string error = overlapping_save(watched, save.added, in_format(format));
    ends.stops += stops;
    turns.end(who);
    return error;
  };
  std::thread thread([&] {
    turns.wait(1);
    ends.second = run(1, second);
  });
  ends.first = run(0, first);
  thread.join();
  return ends;
}

// Expects that a checkpoint is complete, and that nothing else is there.
void expect_complete(const std::shared_ptr<Storage>& storage, std::int64_t added) {
  ASSERT_NO_THROW(EXPECT_EQ(save_in(storage), added));
  EXPECT_EQ(contents_in(*storage), contents_of_checkpoint(*storage));
}

const std::string kTookOver = "another save to memory took over, and no file of it was changed";

// Expects that the saves stopped so often, and that the second, which adds 2000, is the checkpoint.
void expect_second_is_committed(const std::shared_ptr<Storage>& storage, const Ends& ends, std::size_t stops) {
  EXPECT_EQ(ends.stops, stops);
  EXPECT_THAT(ends.first, HasSubstr(kTookOver));
  EXPECT_EQ(ends.second, "");
  expect_complete(storage, 2000);
}

// Returns a save that fails when its `.metadata` is there, and stops before each of the two renames that may undo that.
SaveInTurns save_that_undoes_its_metadata() {
  return {1000,
          {call(StorageStep::rename, "/.metadata"), call(StorageStep::rename, "/.metadata.tmp")},
          after(call(StorageStep::rename, "/.metadata.tmp"), call(StorageStep::sync))};
}

// The first save renames its `.metadata` aside, finds that the second took over, and puts it back.
TEST(TakeOverTest, AnUndoPutsNoMetadataBackOverThatOfALaterSave) {
  const auto storage = memory_storage();
  const Ends ends = save_in_turns(
      storage, SaveFormat::dcp, save_that_undoes_its_metadata(),
      {2000, {call(StorageStep::rename, "/.metadata.1.tmp"), call(StorageStep::rename, "/.tessera.json.tmp")}});
  expect_second_is_committed(storage, ends, 4);
}

// The first save renames the `.metadata` of the second aside, and puts it back.
TEST(TakeOverTest, ALaterSaveDoesNotRemoveItsMetadataThatAnUndoMovedAside) {
  const auto storage = memory_storage();
  const Ends ends = save_in_turns(
      storage, SaveFormat::dcp, save_that_undoes_its_metadata(),
      {2000, {after(call(StorageStep::rename, "/.metadata.1.tmp"), call(StorageStep::rename, "/.tessera.json.tmp"))}});
  expect_second_is_committed(storage, ends, 3);
}

TEST(TakeOverTest, AnUndoPutsNoSidecarBackOverThatOfALaterSave) {
  for (const bool has_old : {false, true}) {
    const auto storage = memory_storage();
    if (has_old) {
      ASSERT_EQ(overlapping_save(storage, 3000, in_format(SaveFormat::dcp)), "");
      storage->remove(".tessera.json");
    }
    const Ends ends = save_in_turns(
        storage, SaveFormat::dcp,
        {1000,
         {after(call(StorageStep::rename, "/.tessera.json"), call(StorageStep::open, "/.tessera.json.tmp"))},
         after(call(StorageStep::rename, "/.tessera.json.tmp"), call(StorageStep::sync))},
        {2000, {call(StorageStep::remove, ".distcp")}});
    expect_second_is_committed(storage, ends, 2);
  }
}

// The second save looks at `.metadata` before the first restores it, and fails after it took over.
TEST(TakeOverTest, IfAnUndoEndsMeanwhileTheOldCheckpointHasItsSidecar) {
  const auto storage = memory_storage();
  ASSERT_EQ(overlapping_save(storage, 3000, in_format(SaveFormat::dcp)), "");
  const FileContents before = contents_in(*storage);
  const Ends ends = save_in_turns(
      storage, SaveFormat::dcp,
      {1000,
       {after(call(StorageStep::rename, "/.tessera.json.tmp"), call(StorageStep::create, "/.metadata.1.tmp")),
        after(call(StorageStep::rename, "/.metadata.1.tmp"), call(StorageStep::sync))},
       after(call(StorageStep::rename, "/.tessera.json.tmp"), call(StorageStep::sync))},
      {2000,
       {call(StorageStep::rename, "/.tessera.json.tmp")},
       after(call(StorageStep::create, "/.tessera.json.tmp"), call(StorageStep::sync))});
  EXPECT_EQ(ends.stops, 3u);
  EXPECT_THAT(ends.first, StartsWith("io: "));
  EXPECT_THAT(ends.second, StartsWith("io: "));
  EXPECT_EQ(contents_in(*storage), before);
}

// The first save has found that the temporary sidecar is its own, and is about to remove it.
TEST(TakeOverTest, AnUndoDoesNotRemoveTheTemporarySidecarOfALaterSave) {
  const auto storage = memory_storage();
  const Ends ends = save_in_turns(storage, SaveFormat::dcp,
                                  {1000,
                                   {call(StorageStep::rename, "/.tessera.json.tmp")},
                                   after(call(StorageStep::create, "/.tessera.json.tmp"), call(StorageStep::sync))},
                                  {2000, {call(StorageStep::rename, "/.metadata.1.tmp")}});
  EXPECT_EQ(ends.stops, 2u);
  EXPECT_THAT(ends.first, StartsWith("io: "));
  EXPECT_EQ(ends.second, "");
  expect_complete(storage, 2000);
}

// The second save restores the sidecar of the first, which is about to rename its own and has found it.
TEST(TakeOverTest, ASlowCommitDoesNotTakeTheSidecarThatAnUndoRestoresForItsOwn) {
  const auto storage = memory_storage();
  const Call commits =
      after(call(StorageStep::rename, "/.metadata.1.tmp"), call(StorageStep::rename, "/.tessera.json.tmp"));
  const Ends ends = save_in_turns(
      storage, SaveFormat::dcp, {1000, {call(StorageStep::rename, "/.tessera.json.tmp")}},
      {2000,
       {after(call(StorageStep::rename, "/.metadata.1.tmp"), call(StorageStep::create, "/.metadata.1.tmp"))},
       after(commits, call(StorageStep::sync))});
  EXPECT_EQ(ends.stops, 2u);
  EXPECT_THAT(ends.first, HasSubstr(kTookOver));
  EXPECT_THAT(ends.second, StartsWith("io: "));
  expect_complete(storage, 1000);
}

TEST(TakeOverTest, OfACommitThatIsUndoneMeanwhileSucceeds) {
  const auto storage = memory_storage();
  const Ends ends = save_in_turns(storage, SaveFormat::dcp, {1000, {call(StorageStep::rename, "/.metadata.tmp")}},
                                  {2000, {call(StorageStep::rename, "/.tessera.json.tmp")}});
  EXPECT_EQ(ends.stops, 2u);
  EXPECT_THAT(ends.first, StartsWith("invalid_argument: "));
  EXPECT_THAT(ends.first, HasSubstr(kTookOver));
  EXPECT_EQ(ends.second, "");
  expect_complete(storage, 2000);
}

TEST(TakeOverTest, OfACommitThatEndsMeanwhileSucceeds) {
  const auto storage = memory_storage();
  const Ends ends = save_in_turns(storage, SaveFormat::dcp, {1000, {call(StorageStep::rename, "/.tessera.json.tmp")}},
                                  {2000, {call(StorageStep::rename, "/.tessera.json.tmp")}});
  EXPECT_EQ(ends.stops, 2u);
  EXPECT_EQ(ends.first, "");
  EXPECT_EQ(ends.second, "");
  expect_complete(storage, 2000);
}

// A training that is repeated saves the same bytes. The first save lists the files, or is about to rename what it takes
// for its temporary sidecar.
TEST(TakeOverTest, OfShardsWithEqualContentsTheSecondIsCommitted) {
  const Call has_temporary = call(StorageStep::create, "/.tessera.json.tmp");
  for (const Call& next : {call(StorageStep::list), call(StorageStep::rename, "/.tessera.json.tmp")}) {
    const auto storage = memory_storage();
    const Ends ends = save_in_turns(storage, SaveFormat::safetensors_shards, {1000, {after(has_temporary, next)}},
                                    {1000, {after(has_temporary, next)}});
    EXPECT_EQ(ends.stops, 2u);
    EXPECT_THAT(ends.first, StartsWith("invalid_argument: "));
    EXPECT_EQ(ends.second, "");
    expect_complete(storage, 1000);
  }
}

// A sync of the first save fails. From about then on, the two take turns at random calls.
TEST(TakeOverTest, WhileAFailedSaveIsUndoneNoneIsLostThatReturnedWithoutAnError) {
  const int cases =
      400 * ::tessera::testing::chaos_factor() / static_cast<int>(::tessera::testing::stride_if_sanitized(5));
  std::mt19937 random(1);
  const auto below = [&](std::uint64_t end) {
    return std::uniform_int_distribution<std::uint64_t>(0, end - 1)(random);
  };
  std::size_t overlaps = 0, replaced = 0;
  for (int i = 0; i < cases; ++i) {
    const auto storage = memory_storage();
    const bool has_old = below(2) == 0;
    if (has_old) {
      ASSERT_EQ(overlapping_save(storage, 3000, in_format(SaveFormat::dcp)), "");
    }
    if (has_old && below(3) == 0) storage->remove(".tessera.json");
    const std::uint64_t fails_from = 10 + below(25);
    const Call fails = [fails_from](const StorageEvent& event) {
      return event.step == StorageStep::sync && event.number >= fails_from;
    };
    SaveInTurns first{1000, {}, fails}, second{2000, {}, nullptr};
    std::string calls;
    const auto add_stop = [&](SaveInTurns& save, std::uint64_t number) {
      save.stops.push_back(call_number(number));
      calls += fmt::format(" {}", number);
    };
    std::uint64_t of_first = 20 + below(30), of_second = below(45);
    for (int turn = 0; turn < 3; ++turn) {
      add_stop(first, of_first);
      add_stop(second, of_second);
      of_first += 1 + below(6);
      of_second += 1 + below(15);
    }
    SCOPED_TRACE(
        fmt::format("case {}, checkpoint {}, stops of the first and the second in turn:{}", i, has_old, calls));
    const Ends ends = save_in_turns(storage, SaveFormat::dcp, first, second);
    SCOPED_TRACE(fmt::format("first: {}\nsecond: {}", ends.first, ends.second));
    overlaps += ends.stops > 1 ? 1 : 0;
    std::int64_t found = 0;  // no checkpoint
    if (storage->size_bytes(".metadata")) {
      ASSERT_NO_THROW(found = save_in(storage));
    }
    ASSERT_NE(found, -1);
    if (ends.second.empty()) {
      ++replaced;
      ASSERT_EQ(found, 2000);
    } else {
      ASSERT_THAT(ends.second, StartsWith("invalid_argument: "));
    }
    ASSERT_TRUE(!ends.first.empty() || found == 1000 || found == 2000);
    ASSERT_TRUE(found != 0 || !has_old);
    ASSERT_EQ(overlapping_save(storage, 4000, in_format(SaveFormat::dcp)), "");
    expect_complete(storage, 4000);
  }
  fmt::print("{} saves took turns, the second was committed {} times\n", overlaps, replaced);
  EXPECT_GT(overlaps, static_cast<std::size_t>(cases / 4));
  EXPECT_GT(replaced, static_cast<std::size_t>(cases / 4));
}

}  // namespace
}  // namespace tessera::checkpoint
