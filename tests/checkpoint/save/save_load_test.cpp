// Saves on N ranks and loads on M ranks.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <set>

#include "checkpoint/save/saved_states.h"
#include "support/chaos.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "support/thread_ranks.h"
#include "tessera/checkpoint/faulty_storage.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/format/dcp_metadata.h"
#include "tessera/format/python_value.h"

namespace tessera::checkpoint {
namespace {

using namespace saved;
using ::tessera::testing::put_byte;
using ::tessera::testing::run_thread_ranks;
using ::tessera::testing::TemporaryDirectory;
using ::tessera::testing::ThreadLink;
using ::tessera::testing::ThreadRanks;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class SaveLoadTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, SaveLoadTest, ::testing::Range(1, 9));

TEST_P(SaveLoadTest, EveryLayoutLoadsInEveryLayoutOnEveryNumberOfRanks) {
  ::tessera::testing::SampleIfSanitized sample(11);
  for (const NamedLayout& from : layouts()) {
    const auto storage = memory_storage();
    EXPECT_THAT(save_on(GetParam(), from.boxes, storage), Each(""));
    for (const NamedLayout& to : layouts()) {
      SCOPED_TRACE(std::string(from.name) + " to " + to.name);
      for (int ranks = 1; ranks <= 8; ++ranks) {
        if (sample.takes_next()) expect_loads_on(ranks, to.boxes, storage);
      }
    }
  }
}

TEST_P(SaveLoadTest, AnyNumberOfFilesOnDiskIsVerified) {
  ::tessera::testing::SampleIfSanitized sample(3);
  for (const std::size_t files : {std::size_t{1}, std::size_t{3}, std::size_t{0}}) {
    for (const NamedLayout& layout : layouts()) {
      if (!sample.takes_next()) continue;
      const TemporaryDirectory directory;
      WriteOptions options;
      options.files_per_rank = files;
      const auto storage = file_system_storage(directory / "ckpt");
      EXPECT_THAT(save_on(GetParam(), layout.boxes, storage, options), Each(""));
      const VerifyReport report = verify(directory / "ckpt");
      EXPECT_TRUE(report.good()) << report.problems.at(0).what;
      EXPECT_TRUE(report.has_sidecar);
      EXPECT_THAT(report.left_over, ElementsAre());
      expect_loads_on(2, layout.boxes, storage);
    }
  }
}

// --- which rank saves what

TEST(SaveTest, WhatAllRanksHaveIsWrittenOnceAndSpread) {
  const auto storage = memory_storage();
  std::vector<std::uint64_t> written(4);
  run_thread_ranks(4, [&](ThreadLink& link) {
    FlatState state;
    for (int i = 0; i < 12; ++i) state.push_back(tensor_entry("t" + std::to_string(i), {100}, {Box({0}, {100})}));
    written[static_cast<std::size_t>(link.rank())] = write_state(state, storage, link).written_bytes;
  });
  EXPECT_THAT(written, Each(written[0]));
  const auto checkpoint = Checkpoint::open(storage);
  std::set<std::uint32_t> files;
  for (const TensorInfo& tensor : checkpoint->tensors()) {
    EXPECT_EQ(tensor.chunks.size(), 1u);
    files.insert(tensor.stored[0].file);
  }
  EXPECT_EQ(files.size(), 4u);
}

TEST(SaveTest, TheOrderOfTheStateIsKept) {
  const auto storage = memory_storage();
  write_state({object_entry("z", 1), tensor_entry("y", {2}, {Box({0}, {2})}), object_entry("x", 2),
               tensor_entry("w", {2}, {Box({0}, {2})})},
              storage);
  const auto checkpoint = Checkpoint::open(storage);
  std::vector<std::string> names;
  for (const dcp::MetadataEntry& entry : checkpoint->dcp_metadata()->entries) names.push_back(entry.name);
  EXPECT_THAT(names, ElementsAre("z", "y", "x", "w"));
}

TEST(SaveTest, OverACheckpointWithoutCollectivesNothingOfItIsLeft) {
  const TemporaryDirectory directory;
  const auto storage = file_system_storage(directory.path());
  for (const char* name : {"__0.metadata", "__1.metadata", "__0_0.distcp", "__1_0.distcp"}) {
    write_new_file(*storage, name, as_bytes("old"));
  }
  write_state({tensor_entry("a", {4}, {Box({0}, {4})})}, storage);
  EXPECT_THAT(storage->list(), ElementsAre(".metadata", ".tessera.json", "__0_0.1.distcp"));
  EXPECT_TRUE(verify(directory.path()).good());
}

TEST(SaveTest, MetadataAboveTheLimitIsNotRead) {
  const auto storage = memory_storage();
  EXPECT_THAT(save_on(2, layouts()[0].boxes, storage), Each(""));
  std::atomic<int> reads = 0;
  const auto watched = faulty_storage(storage, [&](const StorageEvent& event) {
    if (event.step == StorageStep::read && event.file.ends_with(".metadata")) ++reads;
    return StorageFault::none;
  });
  const auto errors = run_thread_ranks(2, [&](ThreadLink& link) {
    OpenOptions options;
    options.max_metadata_bytes = 100;
    open_on_all_ranks(watched, link, options);
  });
  EXPECT_THAT(errors, Each(HasSubstr("expected at most 100")));
  EXPECT_EQ(reads, 0);
}

// Each rank's metadata lists its own chunk of a tensor, and one that both have.
TEST(SaveTest, TheMetadataOfRanksTogetherDescribeTheTensors) {
  constexpr int ranks = 3;
  const auto storage = memory_storage();
  EXPECT_THAT(save_on(ranks, layouts()[0].boxes, storage), Each(""));
  const dcp::Metadata written = dcp::read(*storage->open(".metadata"));
  for (int rank = 0; rank < ranks; ++rank) {
    dcp::Metadata part = written;
    for (dcp::MetadataEntry& entry : part.entries) {
      const auto mine = static_cast<std::size_t>(rank);
      if (!entry.is_tensor || entry.items.size() != ranks) continue;
      entry.chunks = BoxList({Box(entry.chunks[mine])});
      entry.items = {entry.items[mine]};
    }
    write_new_file(*storage, fmt::format("__{}.metadata", rank), dcp::write(part));
  }
  const auto expected = Checkpoint::open(storage);
  storage->remove(".metadata");
  storage->remove(".tessera.json");
  const auto opened = Checkpoint::open(storage);
  ASSERT_EQ(opened->tensors().size(), expected->tensors().size());
  for (std::size_t i = 0; i < opened->tensors().size(); ++i) {
    EXPECT_EQ(opened->tensors()[i].chunks.size(), expected->tensors()[i].chunks.size()) << opened->tensors()[i].name;
    opened->check_partition(i);
  }
  expect_loads_on(2, layouts()[1].boxes, storage);
}

// PyTorch: FileSystemWriter(overwrite=False).
TEST(SaveTest, WithoutOverwriteACheckpointIsNotReplaced) {
  WriteOptions options;
  options.overwrite = false;
  const Layout rows = layouts()[0].boxes;
  const auto storage = memory_storage();
  EXPECT_THAT(save_on(3, rows, storage, options), Each(""));
  expect_loads_on(2, rows, storage);
  const std::vector<std::string> files = storage->list();
  EXPECT_THAT(save_on(3, rows, storage, options, 1000),
              Each(HasSubstr("rank 0: save to memory: found a checkpoint, expected none, because overwrite is false")));
  EXPECT_EQ(storage->list(), files);
  expect_loads_on(2, rows, storage);
  // Files that no checkpoint refers to are none, and one that ranks saved without collectives is one.
  const auto left = memory_storage();
  write_new_file(*left, "__0_0.distcp", as_bytes("of a save that was killed"));
  EXPECT_THAT(save_on(2, rows, left, options), Each(""));
  const auto by_rank = memory_storage();
  write_new_file(*by_rank, "__0.metadata", as_bytes("old"));
  EXPECT_THAT(save_on(2, rows, by_rank, options), Each(HasSubstr("found a checkpoint, expected none")));
}

TEST(SaveTest, TheMetadataHasTheNameOfTheSave) {
  // PyTorch before 2.3 does not have the class that the name is stored in.
  for (const dcp::Dialect dialect : {dcp::Dialect::torch_2, dcp::Dialect::torch_2_0, dcp::Dialect::torch_1_13}) {
    const auto storage = memory_storage();
    WriteOptions options;
    options.dialect = dialect;
    for (const std::optional<std::string>& id :
         {std::optional<std::string>(), std::optional<std::string>("run-7/100")}) {
      options.save_id = id;
      EXPECT_THAT(save_on(2, layouts()[0].boxes, storage, options), Each(""));
      const auto checkpoint = Checkpoint::open(storage);
      const auto& meta = checkpoint->dcp_metadata()->storage_meta;
      ASSERT_EQ(meta.has_value(), dialect == dcp::Dialect::torch_2);
      if (meta) {
        EXPECT_EQ(meta->save_id, id);
      }
      expect_loads_on(1, layouts()[0].boxes, storage);
    }
  }
}

TEST(SaveTest, AStateWithNothingInItIsACheckpoint) {
  const TemporaryDirectory directory;
  write_state({}, file_system_storage(directory / "ckpt"));
  EXPECT_TRUE(verify(directory / "ckpt").good());
}

TEST(SaveTest, StatesThatDoNotFitAreAnErrorOnAllRanksAndLeaveNothing) {
  struct Case {
    std::function<FlatState(int rank)> state;
    std::string error;
  };
  const auto full = [](const std::string& name, const Shape& shape) {
    return tensor_entry(name, shape, {Box::full(shape)});
  };
  const std::vector<Case> cases = {
      {[&](int rank) { return FlatState{tensor_entry("a", {4}, {Box({rank * 2}, {rank == 0 ? 2 : 1})})}; },
       "tensor 'a' of shape [4]: no rank has [3, 4)"},
      {[&](int rank) { return FlatState{tensor_entry("a", {4}, {Box({rank}, {3})})}; },
       "chunks [0, 3) of rank 0 and [1, 4) of rank 1 overlap"},
      {[&](int rank) { return FlatState{tensor_entry("a", {4}, {Box({rank * 2}, {rank == 0 ? 2 : 3})})}; },
       "chunk [2, 5) of rank 1 is not within the shape"},
      {[&](int rank) {
         return FlatState{full("a", rank == 0 ? Shape{4} : Shape{2, 2})};
       },
       "'a': its shape is [4] on rank 0 and [2, 2] on rank 1"},
      {[&](int rank) { return FlatState{rank == 0 ? full("a", {4}) : object_entry("a", 1)}; },
       "'a': it is a tensor on rank 0 and an object on rank 1"},
      {[&](int) {
         return FlatState{full("a", {4}), object_entry("a", 1)};
       },
       "the name 'a' occurs twice"},
      {[&](int rank) {
         if (rank == 1) fail(ErrorCode::io, "no such luck");
         return FlatState{object_entry("a", 1)};
       },
       "rank 1 died"},
  };
  for (const Case& one : cases) {
    const auto storage = memory_storage();
    const auto errors =
        run_thread_ranks(2, [&](ThreadLink& link) { write_state(one.state(link.rank()), storage, link); });
    EXPECT_THAT(errors[0], HasSubstr(one.error));
    EXPECT_THAT(storage->list(), ElementsAre());
    if (one.error != "rank 1 died") {
      EXPECT_THAT(errors[1], HasSubstr(one.error));
    }
  }
}

// --- reused plans

TEST(SavePlanCacheTest, UnchangedPlansAreNotGathered) {
  const auto storage = memory_storage();
  const auto errors = run_thread_ranks(4, [&](ThreadLink& link) {
    SavePlanCache cache;
    WriteOptions options;
    options.cache = &cache;
    const Layout rows = layouts()[0].boxes;
    std::uint64_t sent = 0;
    for (int step = 0; step < 4; ++step) {
      const std::uint64_t before = link.sent_bytes;
      // From 127 to 128 and from 255 to 256, the pickle of the step becomes longer.
      const WriteReport report =
          write_state(state_of(rows, link.rank(), 4, step == 0 ? 0 : 27 + 64 * step), storage, link, options);
      EXPECT_EQ(report.plan_was_reused, step > 0);
      if (step == 0) {
        sent = link.sent_bytes - before;
      } else {
        EXPECT_LT(link.sent_bytes - before, sent / 3);
        EXPECT_EQ(report.planned_bytes, 1u);
      }
      link.agree("saved", nullptr);
      const Wanted wanted = wanted_of(layouts()[1].boxes, link.rank(), 4);
      read_state(wanted.targets, open_on_all_ranks(storage, link), link);
      EXPECT_TRUE(wanted.is_right(step == 0 ? 0 : 27 + 64 * step));
    }
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(SavePlanCacheTest, AChangeOnOneRankIsSeenByAll) {
  const auto storage = memory_storage();
  const auto errors = run_thread_ranks(3, [&](ThreadLink& link) {
    SavePlanCache cache;
    WriteOptions options;
    options.cache = &cache;
    for (int step = 0; step < 3; ++step) {
      FlatState state = state_of(layouts()[0].boxes, link.rank(), 3);
      if (step == 1 && link.rank() == 2) state.push_back(object_entry("only here", 1));
      EXPECT_FALSE(write_state(state, storage, link, options).plan_was_reused) << step;
      link.agree("saved", nullptr);
      EXPECT_EQ(Checkpoint::open(storage)->find_object("only here").has_value(), step == 1);
      link.agree("looked", nullptr);
    }
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(SavePlanCacheTest, APlanThatFailedIsNotReused) {
  const auto storage = memory_storage();
  const auto errors = run_thread_ranks(3, [&](ThreadLink& link) {
    SavePlanCache cache;
    WriteOptions options;
    options.cache = &cache;
    const auto save = [&](bool is_right) {
      const std::vector<Box> rows = layouts()[0].boxes({9}, link.rank(), 3);
      const bool lacks_a_row = !is_right && link.rank() == 1;
      return write_state({tensor_entry("rows", {9}, lacks_a_row ? std::vector<Box>{Box({3}, {2})} : rows)}, storage,
                         link, options);
    };
    for (int round = 0; round < 2; ++round) {
      EXPECT_FALSE(save(true).plan_was_reused) << round;
      EXPECT_TRUE(save(true).plan_was_reused) << round;
      for (int attempt = 0; attempt < 2; ++attempt) {
        EXPECT_ERROR(save(false), ErrorCode::invalid_argument, "tensor 'rows' of shape [9]: no rank has [5, 6)");
      }
    }
  });
  EXPECT_THAT(errors, Each(""));
}

// --- loading

TEST(LoadTest, OnlyWantedBytesAreRead) {
  const auto storage = memory_storage();
  const Shape shape = {512, 512};
  EXPECT_THAT(run_thread_ranks(4,
                               [&](ThreadLink& link) {
                                 write_state({tensor_entry("a", shape, layouts()[0].boxes(shape, link.rank(), 4))},
                                             storage, link);
                               }),
              Each(""));
  Wanted wanted;
  wanted.add("a", shape, layouts()[1].boxes(shape, 2, 4));
  const ReadReport report = read_state(wanted.targets, Checkpoint::open(storage));
  EXPECT_TRUE(wanted.is_right());
  EXPECT_EQ(report.wanted_bytes, 512u * 128 * 8);
  EXPECT_LE(report.read_bytes, report.wanted_bytes * 11 / 10);
}

// Loads with shared reads among the ranks of each node: `node_size` consecutive ranks.
std::vector<ReadReport> load_by_nodes(int ranks, int node_size, const Layout& layout,
                                      const std::shared_ptr<Storage>& storage) {
  std::vector<std::unique_ptr<ThreadRanks>> nodes;
  for (int first = 0; first < ranks; first += node_size) {
    nodes.push_back(std::make_unique<ThreadRanks>(std::min(node_size, ranks - first)));
  }
  std::vector<ReadReport> reports(static_cast<std::size_t>(ranks));
  const auto errors = run_thread_ranks(ranks, [&](ThreadLink& link) {
    const Wanted wanted = wanted_of(layout, link.rank(), ranks);
    ThreadLink node(*nodes[static_cast<std::size_t>(link.rank() / node_size)], link.rank() % node_size);
    ReadOptions options;
    options.share_reads_among = &node;
    const auto checkpoint = open_on_all_ranks(storage, link);
    reports[static_cast<std::size_t>(link.rank())] = read_state(wanted.targets, checkpoint, link, options);
    EXPECT_TRUE(wanted.is_right());
  });
  EXPECT_THAT(errors, Each(""));
  return reports;
}

std::uint64_t read_bytes(const std::vector<ReadReport>& reports) {
  std::uint64_t bytes = 0;
  for (const ReadReport& report : reports) bytes += report.read_bytes;
  return bytes;
}

TEST(LoadTest, WhatSeveralRanksOfANodeWantIsReadOnce) {
  std::uint64_t total_bytes = 0;
  for (const Shape& shape : shapes()) total_bytes += static_cast<std::uint64_t>(volume(Box::full(shape))) * 8;
  for (const NamedLayout& from : layouts()) {
    const auto storage = memory_storage();
    EXPECT_THAT(save_on(3, from.boxes, storage), Each(""));
    for (const int ranks : {2, 5}) {
      for (const int node_size : {1, 2, 5}) {
        SCOPED_TRACE(fmt::format("{}: {} ranks, {} a node", from.name, ranks, node_size));
        const auto nodes = static_cast<std::uint64_t>((ranks + node_size - 1) / node_size);
        EXPECT_EQ(read_bytes(load_by_nodes(ranks, node_size, layouts()[3].boxes, storage)), total_bytes * nodes);
        for (const NamedLayout& to : layouts()) load_by_nodes(ranks, node_size, to.boxes, storage);
      }
    }
  }
}

TEST(LoadTest, WhatOverlapsInPartIsReadOnce) {
  const auto storage = memory_storage();
  EXPECT_THAT(save_on(2, layouts()[0].boxes, storage), Each(""));
  // Rank r wants rows [r, end): every rank wants the last row, one rank wants the first.
  const Layout from_own_row = [](const Shape& shape, int rank, int) {
    Box box = Box::full(shape);
    if (!shape.empty()) {
      box.offsets[0] = std::min<std::int64_t>(rank, shape[0]);
      box.sizes[0] -= box.offsets[0];
    }
    return std::vector<Box>{box};
  };
  const std::vector<ReadReport> reports = load_by_nodes(4, 4, from_own_row, storage);
  EXPECT_EQ(read_bytes(reports), reports[0].wanted_bytes);  // rank 0 wants all
}

TEST(LoadTest, DamageThatOneRankReadsForOthersIsAnErrorOnAll) {
  const TemporaryDirectory directory;
  const auto storage = file_system_storage(directory / "ckpt");
  write_state({tensor_entry("a", {1000}, {Box({0}, {1000})})}, storage);
  put_byte(directory / "ckpt" / "__0_0.distcp", 5000, 0x55);
  ThreadRanks node(3);
  const auto errors = run_thread_ranks(3, [&](ThreadLink& link) {
    Wanted wanted;
    wanted.add("a", {1000}, {Box({0}, {1000})});
    ThreadLink node_link(node, link.rank());
    ReadOptions options;
    options.share_reads_among = &node_link;
    read_state(wanted.targets, open_on_all_ranks(storage, link), link, options);
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("corrupt: load "), HasSubstr("1 of 3 ranks failed"),
                                 HasSubstr("__0_0.distcp at byte "), HasSubstr("tensor 'a', chunk [0, 1000)"))));
}

TEST(LoadTest, Refusals) {
  const auto storage = memory_storage();
  write_state({tensor_entry("a", {4}, {Box({0}, {4})}), object_entry("o", 1)}, storage);
  const auto checkpoint = Checkpoint::open(storage);
  const auto want = [&](const std::string& name, const Shape& shape) {
    Wanted wanted;
    wanted.add(name, shape, {Box::full(shape)});
    return wanted.targets;
  };
  EXPECT_ERROR(read_state(want("b", {4}), checkpoint), ErrorCode::not_found, "load memory",
               "the checkpoint has no 'b'");
  EXPECT_ERROR(read_state(want("a", {2, 2}), checkpoint), ErrorCode::invalid_argument,
               "load memory: tensor 'a' has shape [4], expected [2, 2]");
  EXPECT_ERROR(read_state(want("o", {4}), checkpoint), ErrorCode::invalid_argument,
               "load memory: 'o' is an object, expected a tensor");
  EXPECT_ERROR(read_state({{"a", TargetObject{}}}, checkpoint), ErrorCode::invalid_argument,
               "load memory: 'a' is a tensor, expected an object");
  Targets other_dtype = want("a", {4});
  std::get<TargetTensor>(other_dtype[0].value).dtype = DType::float32;
  EXPECT_ERROR(read_state(other_dtype, checkpoint), ErrorCode::invalid_argument,
               "tensor 'a' has dtype int64, expected float32");
  ReadOptions partial;
  partial.rules.allow_partial = true;
  EXPECT_THAT(read_state(want("b", {4}), checkpoint, alone(), partial).missing, ElementsAre("b"));
}

// The chunks have the right number of elements, but one element occurs twice.
TEST(LoadTest, AnOverlapDoesNotHideAHole) {
  const auto storage = memory_storage();
  write_state({tensor_entry("a", {6}, {Box({0}, {3}), Box({3}, {3})})}, storage);
  dcp::Metadata metadata = dcp::read(*storage->open(".metadata"));
  BoxList moved(1);
  moved.push_back(metadata.entries.at(0).chunks[0]);
  moved.push_back(Box({2}, {3}));
  metadata.entries[0].chunks = moved;
  storage->remove(".metadata");
  storage->remove(".tessera.json");
  write_new_file(*storage, ".metadata", dcp::write(metadata));
  Wanted wanted;
  wanted.add("a", {6}, {Box({0}, {6})});
  EXPECT_ERROR(read_state(wanted.targets, Checkpoint::open(storage)), ErrorCode::corrupt, "tensor 'a'",
               "chunks [0, 3) and [2, 5) overlap");
}

TEST(LoadTest, DamageIsNamedOnAllRanks) {
  const TemporaryDirectory directory;
  const auto storage = file_system_storage(directory / "ckpt");
  write_state({tensor_entry("a", {1000}, {Box({0}, {1000})})}, storage);
  put_byte(directory / "ckpt" / "__0_0.distcp", 5000, 0x55);
  const auto errors = run_thread_ranks(2, [&](ThreadLink& link) {
    Wanted wanted;
    if (link.rank() == 1) wanted.add("a", {1000}, {Box({0}, {1000})});
    read_state(wanted.targets, open_on_all_ranks(storage, link), link);
  });
  for (const std::string& one : errors) {
    EXPECT_THAT(one, HasSubstr("corrupt: load "));
    EXPECT_THAT(one, HasSubstr("1 of 2 ranks failed; rank 1: "));
    EXPECT_THAT(one, HasSubstr("__0_0.distcp at byte "));
    EXPECT_THAT(one, HasSubstr("tensor 'a', chunk [0, 1000)"));
  }
  ReadOptions unchecked;
  unchecked.check_checksums = false;
  Wanted wanted;
  wanted.add("a", {1000}, {Box({0}, {1000})});
  OpenOptions without_sidecar;
  without_sidecar.check_checksums = false;
  read_state(wanted.targets, Checkpoint::open(storage, without_sidecar), alone(), unchecked);
  EXPECT_FALSE(wanted.is_right());
}

TEST(LoadTest, FloatingPointIsCastByChoice) {
  const auto storage = memory_storage();
  const std::vector<float> numbers = {1.5F, -2.25F, 3e38F, 0.1F};
  StateTensor tensor;
  tensor.shape = {2, 2};
  tensor.chunks.push_back({Box::full(tensor.shape), [&] {
                             return HostMemory{reinterpret_cast<const std::uint8_t*>(numbers.data()), {}, {}};
                           }});
  write_state({{"a", {"a"}, tensor}}, storage);
  std::vector<double> got(4);
  TargetTensor target{
      DType::float64, {2, 2}, {{Box::full(tensor.shape), {reinterpret_cast<std::uint8_t*>(got.data()), {1, 2}}}}};
  ReadOptions options;
  options.rules.allow_cast = true;
  read_state({{"a", target}}, Checkpoint::open(storage), alone(), options);
  EXPECT_THAT(got, ElementsAre(1.5, 3e38F, -2.25, 0.1F));
}

}  // namespace
}  // namespace tessera::checkpoint
