#include "tessera/layout/redistribution.h"

#include <gtest/gtest.h>

#include "support/box_generators.h"
#include "support/chaos.h"
#include "support/element_oracle.h"
#include "tessera/layout/sharding.h"

namespace tessera {

// In the namespace where GoogleTest finds it.
std::ostream& operator<<(std::ostream& out, const Transfer& transfer) {
  return out << transfer.source << " to " << transfer.destination << ": " << transfer.box;
}

namespace {

using testing::any_between;
using testing::any_box;
using testing::any_boxes;
using testing::any_partition;
using testing::any_shape;
using testing::list_of;
using testing::mesh_boxes;
using testing::Shape;

RC_GTEST_PROP(RedistributeTest, TransfersAreAllIntersectionsInOrder, ()) {
  const Shape shape = any_shape();
  const BoxList sources = any_boxes(shape, 20), destinations = any_boxes(shape);
  std::vector<Transfer> expected;
  for (std::size_t d = 0; d < destinations.size(); ++d) {
    for (std::size_t s = 0; s < sources.size(); ++s) {
      if (const std::optional<Box> shared = intersect(sources[s], destinations[d])) expected.push_back({s, d, *shared});
    }
  }
  RC_ASSERT(plan_transfers(sources, destinations) == expected);
}

RC_GTEST_PROP(RedistributeTest, TransfersPartitionEachDestinationIfSourcesPartitionTheShape, ()) {
  const Shape shape = any_shape();
  const BoxList sources = list_of(shape.size(), any_partition(shape, any_between(0, 40)));
  const BoxList destinations = any_boxes(shape);
  const std::vector<Transfer> transfers = plan_transfers(sources, destinations);
  for (std::size_t d = 0; d < destinations.size(); ++d) {
    std::map<testing::Element, int> received;
    for (const Transfer& transfer : transfers) {
      if (transfer.destination != d) continue;
      RC_ASSERT(contains(sources[transfer.source], transfer.box));
      for (const testing::Element& element : testing::elements(transfer.box)) ++received[element];
    }
    std::map<testing::Element, int> expected;
    for (const testing::Element& element : testing::elements(destinations[d])) expected[element] = 1;
    RC_ASSERT(received == expected);
  }
}

TEST(RedistributeTest, RowShardsToColumnShards) {
  const Shape shape = {4, 6};
  const std::vector<Transfer> expected = {{0, 0, Box({0, 0}, {2, 2})}, {1, 0, Box({2, 0}, {2, 2})},
                                          {0, 1, Box({0, 2}, {2, 2})}, {1, 1, Box({2, 2}, {2, 2})},
                                          {0, 2, Box({0, 4}, {2, 2})}, {1, 2, Box({2, 4}, {2, 2})}};
  EXPECT_EQ(plan_transfers(chunk_boxes(shape, 0, 2), chunk_boxes(shape, 1, 3)), expected);
}

RC_GTEST_PROP(BoxIndexTest, FindsAllThatOverlapAscending, ()) {
  const Shape shape = any_shape();
  const BoxList boxes = *rc::gen::arbitrary<bool>() ? any_boxes(shape, 60)
                                                    : list_of(shape.size(), any_partition(shape, any_between(0, 60)));
  const BoxIndex index(boxes);
  const Box wanted = any_box(shape);
  std::vector<std::size_t> expected;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    if (overlaps(boxes[i], wanted)) expected.push_back(i);
  }
  RC_ASSERT(index.overlapping(wanted) == expected);
}

TEST(BoxIndexTest, AnEmptyListHasNone) {
  const BoxList none(2);
  EXPECT_TRUE(BoxIndex(none).overlapping(Box({0, 0}, {5, 5})).empty());
}

TEST(BoxIndexTest, FewBoxesAndMany) {
  for (std::int64_t count = 1; count <= 12; ++count) {
    BoxList rows(2);
    for (std::int64_t i = 0; i < count; ++i) rows.push_back(Box({i, 0}, {1, i == 0 ? 0 : 4}));
    const BoxIndex index(rows);
    const std::size_t found = static_cast<std::size_t>(count - 1);
    EXPECT_EQ(index.overlapping(Box({0, 1}, {count, 2})).size(), found) << "the first box is empty";
    EXPECT_EQ(index.overlapping(Box({count - 1, 0}, {1, 4})).size(), count == 1 ? 0u : 1u);
    EXPECT_TRUE(index.overlapping(Box({0, 1}, {count, 0})).empty());
  }
}

TEST(BoxIndexTest, ScalarsOverlap) {
  BoxList scalars(0);
  for (int i = 0; i < 20; ++i) scalars.push_back(Box());
  EXPECT_EQ(BoxIndex(scalars).overlapping(Box()).size(), 20u);
}

// The test is that these finish: comparing pairs would take hours.
constexpr auto kScaleStride = static_cast<std::int64_t>(testing::stride_if_sanitized(10));

TEST(RedistributeScaleTest, AMillionRowShardsToAMillionOthers) {
  constexpr std::int64_t kShards = 1'000'000 / kScaleStride;
  const Shape shape = {3 * kShards, 4096};
  const std::vector<Transfer> transfers =
      plan_transfers(chunk_boxes(shape, 0, kShards), chunk_boxes(shape, 0, kShards * 3 / 2));
  EXPECT_EQ(transfers.size(), static_cast<std::size_t>(2 * kShards));
  std::int64_t elements = 0;
  for (const Transfer& transfer : transfers) elements += volume(transfer.box);
  EXPECT_EQ(elements, 3 * kShards * 4096);
}

TEST(RedistributeScaleTest, EachOfAMillionChunksOfAMeshFindsItself) {
  const BoxList boxes = mesh_boxes({1000 / kScaleStride, 1000}, 8);
  const BoxIndex index(boxes);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < boxes.size(); ++i) wrong += index.overlapping(boxes[i]) == std::vector{i} ? 0 : 1;
  EXPECT_EQ(wrong, 0u);
}

}  // namespace
}  // namespace tessera
