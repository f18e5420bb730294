#include "tessera/checkpoint/save_plan.h"
#include "tessera/format/dcp_metadata.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/box_generators.h"
#include "support/element_oracle.h"
#include "support/error_matchers.h"
#include "tessera/checkpoint/global_save_plan.h"

namespace tessera::checkpoint {
namespace {

using ::tessera::testing::any_between;
using ::tessera::testing::any_partition;
using ::tessera::testing::any_shape;
using ::tessera::testing::list_of;
using ::tessera::testing::Shape;
using ::testing::ElementsAre;

SavePlan::Entry tensor(const std::string& name, const Shape& shape) {
  SavePlan::Entry entry;
  entry.name = name;
  entry.path = {"model", std::int64_t{3}, name};
  entry.shape = shape;
  return entry;
}

SavePlan::Entry object(const std::string& name) {
  SavePlan::Entry entry;
  entry.name = name;
  entry.path = {name};
  entry.is_tensor = false;
  return entry;
}

SavePlan sample() {
  SavePlan plan;
  SavePlan::Entry odd = tensor("odd", {2, 3, 4});
  odd.properties->dtype = DType::bfloat16;
  odd.properties->requires_grad = true;
  odd.properties->pin_memory = true;
  odd.properties->memory_format = MemoryFormat::preserve;
  const std::uint32_t a = plan.add_entry(odd), b = plan.add_entry(object("step")), c = plan.add_entry(tensor("s", {}));
  plan.add_chunk(a, Box({0, 0, 0}, {1, 3, 4}), {});
  plan.add_object(b, {});
  plan.add_chunk(c, Box(), {});
  plan.add_chunk(a, Box({1, 0, 0}, {1, 3, 2}), {});
  plan.set_stored_bytes(0, std::uint64_t{1} << 40);
  SavePlan::Entry unknown = tensor("unknown", {5});
  unknown.properties.reset();
  plan.add_entry(unknown);
  return plan;
}

TEST(SavePlanTest, WhatIsEncodedIsDecoded) {
  const SavePlan plan = sample();
  EXPECT_EQ(SavePlan::decode(plan.encode_entries(), plan.encode_items()), plan);
  EXPECT_EQ(SavePlan::decode(SavePlan().encode_entries(), SavePlan().encode_items()), SavePlan());
}

TEST(SavePlanTest, RowsSayWhatTheyAre) {
  const SavePlan plan = sample();
  EXPECT_EQ(plan.type(0), WriteItemType::shard);
  EXPECT_EQ(plan.type(1), WriteItemType::byte_io);
  EXPECT_EQ(plan.type(2), WriteItemType::tensor);
  EXPECT_EQ(to_string(plan.index(3)), "'odd' at [1, 0, 0]");
  EXPECT_EQ(to_string(plan.index(1)), "'step'");
}

TEST(SavePlanTest, DamagedBytesAreRefused) {
  const SavePlan plan = sample();
  const Bytes entries = plan.encode_entries(), items = plan.encode_items();
  for (std::size_t length = 0; length < entries.size(); ++length) {
    EXPECT_ERROR(SavePlan::decode(ByteView(entries).first(length), items), ErrorCode::corrupt, "save plan");
  }
  for (std::size_t length = 0; length < items.size(); ++length) {
    EXPECT_ERROR(SavePlan::decode(entries, ByteView(items).first(length)), ErrorCode::corrupt, "save plan");
  }
}

TEST(SavePlanTest, Refusals) {
  SavePlan plan;
  const std::uint32_t a = plan.add_entry(tensor("a", {2, 3})), o = plan.add_entry(object("o"));
  EXPECT_ERROR(plan.add_chunk(a, Box({0}, {2}), {}), ErrorCode::invalid_argument, "'a': found chunk [0, 2)",
               "expected one within the shape [2, 3]");
  EXPECT_ERROR(plan.add_chunk(o, Box({0}, {2}), {}), ErrorCode::invalid_argument, "expected none of an object");
  EXPECT_ERROR(plan.add_object(a, {}), ErrorCode::invalid_argument, "'a' is a tensor");
}

GatheredPlans gather(const std::vector<SavePlan>& plans) {
  std::vector<GatheredPlans::Encoded> encoded;
  for (const SavePlan& plan : plans) {
    Bytes entries = plan.encode_entries();
    if (!encoded.empty() && entries == encoded[0].entries) entries.clear();
    encoded.push_back({entries, plan.encode_items()});
  }
  return GatheredPlans(std::move(encoded));
}

RC_GTEST_PROP(GlobalSavePlanProperty, EveryElementIsWrittenOnceByARankThatHasIt, ()) {
  const auto ranks = static_cast<std::size_t>(any_between(1, 5));
  std::vector<SavePlan> plans(ranks);
  struct Tensor {
    std::string name;
    Shape shape;
    std::vector<Box> boxes;
  };
  std::vector<Tensor> tensors;
  for (std::int64_t t = any_between(0, 4); t > 0; --t) {
    const Shape shape = any_shape(1);
    tensors.push_back({"t" + std::to_string(t), shape, any_partition(shape, any_between(0, 6))});
  }
  for (const Tensor& of : tensors) {
    for (SavePlan& plan : plans) {
      if (any_between(0, 3) > 0) plan.add_entry(tensor(of.name, of.shape));
    }
  }
  // Each box is on one or several ranks.
  const auto entry_of = [](SavePlan& plan, const Tensor& of) {
    for (std::uint32_t e = 0; e < plan.entries().size(); ++e) {
      if (plan.entries()[e].name == of.name) return e;
    }
    return plan.add_entry(tensor(of.name, of.shape));
  };
  for (const Tensor& of : tensors) {
    for (const Box& box : of.boxes) {
      const auto first = static_cast<std::size_t>(any_between(0, static_cast<std::int64_t>(ranks) - 1));
      for (std::size_t r = 0; r < ranks; ++r) {
        if (r != first && any_between(0, 2) > 0) continue;
        plans[r].add_chunk(entry_of(plans[r], of), box, {});
        plans[r].set_stored_bytes(plans[r].size() - 1, static_cast<std::uint64_t>(any_between(1, 100)));
      }
    }
  }
  for (const Replicas replicas : {Replicas::spread, Replicas::lowest_rank}) {
    const GlobalSavePlan plan = make_global_plan(gather(plans), replicas);
    RC_ASSERT(plan.metadata.entries.size() == tensors.size());
    std::vector<std::vector<int>> times(plan.metadata.entries.size());
    for (std::size_t e = 0; e < plan.metadata.entries.size(); ++e) {
      const dcp::MetadataEntry& entry = plan.metadata.entries[e];
      RC_ASSERT(::tessera::testing::is_partition(entry.shape, entry.chunks));
      times[e].resize(entry.chunks.size());
    }
    for (std::size_t r = 0; r < ranks; ++r) {
      std::optional<std::uint32_t> last;
      for (const GlobalSavePlan::Written& one : plan.written[r]) {
        const bool ascends = !last || *last < one.item;
        RC_ASSERT(ascends);
        last = one.item;
        const dcp::MetadataEntry& entry = plan.metadata.entries.at(one.entry);
        RC_ASSERT(plans[r].index(one.item).fqn == entry.name);
        RC_ASSERT(plans[r][one.item].box == entry.chunks[one.chunk]);
        RC_ASSERT(plans[r][one.item].stored_bytes == one.stored_bytes);
        ++times[one.entry][one.chunk];
      }
    }
    for (const auto& of_entry : times) {
      for (const int count : of_entry) RC_ASSERT(count == 1);
    }
  }
}

TEST(GlobalSavePlanTest, BytesEvenOut) {
  std::vector<SavePlan> plans(4);
  for (std::size_t r = 0; r < plans.size(); ++r) {
    // Rank 0 already has much data of its own.
    const std::uint32_t own = plans[r].add_entry(tensor("own", {8}));
    const auto at = static_cast<std::int64_t>(2 * r);
    plans[r].add_chunk(own, Box({at}, {2}), {});
    plans[r].set_stored_bytes(0, r == 0 ? 300 : 10);
    for (int i = 0; i < 30; ++i) {
      plans[r].add_chunk(plans[r].add_entry(tensor("r" + std::to_string(i), {4})), Box({0}, {4}), {});
      plans[r].set_stored_bytes(plans[r].size() - 1, 10 + static_cast<std::uint64_t>(i));
    }
  }
  const GlobalSavePlan plan = make_global_plan(gather(plans));
  std::vector<std::uint64_t> bytes(4, 0);
  for (std::size_t r = 0; r < 4; ++r) {
    for (const GlobalSavePlan::Written& one : plan.written[r]) bytes[r] += one.stored_bytes;
  }
  for (const std::uint64_t sum : bytes) EXPECT_NEAR(static_cast<double>(sum), 1065.0 / 4, 40);
  const GlobalSavePlan lowest = make_global_plan(gather(plans), Replicas::lowest_rank);
  EXPECT_EQ(lowest.written[0].size(), 31u);
  EXPECT_EQ(lowest.written[3].size(), 1u);
}

TEST(GlobalSavePlanTest, EmptyChunksAreLeftOutAndEmptyTensorsKeepOne) {
  std::vector<SavePlan> plans(3);
  for (std::size_t r = 0; r < plans.size(); ++r) {
    const auto begin = static_cast<std::int64_t>(std::min<std::size_t>(r, 1));
    plans[r].add_chunk(plans[r].add_entry(tensor("one row", {1, 2})), Box({begin, 0}, {r == 0 ? 1 : 0, 2}), {});
    plans[r].add_chunk(plans[r].add_entry(tensor("nothing", {0, 2})), Box({0, 0}, {0, 2}), {});
  }
  const GlobalSavePlan plan = make_global_plan(gather(plans));
  EXPECT_EQ(plan.metadata.entries[0].chunks, list_of(2, {Box({0, 0}, {1, 2})}));
  EXPECT_EQ(plan.metadata.entries[1].chunks, list_of(2, {Box({0, 0}, {0, 2})}));
}

}  // namespace
}  // namespace tessera::checkpoint
