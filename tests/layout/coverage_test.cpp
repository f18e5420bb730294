#include "tessera/layout/coverage.h"

#include <gtest/gtest.h>

#include "support/box_generators.h"
#include "support/chaos.h"
#include "support/element_oracle.h"
#include "tessera/layout/flat_interval.h"
#include "tessera/layout/sharding.h"

namespace tessera {
namespace {

using testing::any_between;
using testing::any_box;
using testing::any_boxes;
using testing::any_partition;
using testing::any_shape;
using testing::list_of;
using testing::marks;
using testing::mesh_boxes;
using testing::Shape;

bool any_marked_twice(const Shape& shape, const BoxList& boxes) {
  return std::ranges::any_of(marks(shape, boxes), [](const auto& mark) { return mark.second > 1; });
}

bool any_unmarked(const Shape& shape, const BoxList& boxes) {
  return std::ranges::any_of(marks(shape, boxes), [](const auto& mark) { return mark.second == 0; });
}

void check_overlap(const Shape& shape, const BoxList& boxes) {
  const auto pair = find_overlap(boxes);
  RC_ASSERT(pair.has_value() == any_marked_twice(shape, boxes));
  if (!pair) return;
  RC_ASSERT(pair->first < pair->second);
  RC_ASSERT(pair->second < boxes.size());
  RC_ASSERT(overlaps(boxes[pair->first], boxes[pair->second]));
}

void check_hole(const Shape& shape, const BoxList& boxes) {
  const std::optional<Box> hole = find_hole(shape, boxes);
  RC_ASSERT(hole.has_value() == any_unmarked(shape, boxes));
  if (!hole) return;
  RC_ASSERT(is_valid(*hole, shape));
  RC_ASSERT(!is_empty(*hole));
  for (std::size_t i = 0; i < boxes.size(); ++i) RC_ASSERT(!overlaps(*hole, boxes[i]));
}

// Returns a partition with one box removed, one box added, or unchanged.
BoxList nearly_a_partition(const Shape& shape) {
  std::vector<Box> boxes = any_partition(shape, any_between(0, 60));
  switch (any_between(0, 2)) {
    case 0:
      boxes.pop_back();
      break;
    case 1:
      boxes.insert(boxes.begin(), any_box(shape));
      break;
    default:
      break;
  }
  return list_of(shape.size(), boxes);
}

RC_GTEST_PROP(FindOverlapTest, FindsOneIffAnElementIsHeldTwice, ()) {
  const Shape shape = any_shape();
  check_overlap(shape, any_boxes(shape));
}

RC_GTEST_PROP(FindOverlapTest, FindsTheOneBoxTooMany, ()) {
  const Shape shape = any_shape(1);
  check_overlap(shape, nearly_a_partition(shape));
}

// Many boxes that no plane separates: single elements and long boxes.
RC_GTEST_PROP(FindOverlapTest, AgreesWithTheOracleForManyBoxesOfHighRank, ()) {
  const Shape shape = {6, 6, 6};
  BoxList boxes(3);
  std::set<testing::Element> held;
  for (int i = 0; i < 120; ++i) {
    Box box(Shape{any_between(0, 5), any_between(0, 5), any_between(0, 5)}, Shape{1, 1, 1});
    const auto d = static_cast<std::size_t>(any_between(0, 2));
    box.sizes[d] = any_between(1, 6 - box.offsets[d]);
    const std::set<testing::Element> elements = testing::element_set(box);
    const bool is_free = std::ranges::none_of(elements, [&](const auto& element) { return held.contains(element); });
    if (!is_free && any_between(0, 400) != 0) continue;
    held.insert(elements.begin(), elements.end());
    boxes.push_back(box);
  }
  check_overlap(shape, boxes);
  check_hole(shape, boxes);
}

RC_GTEST_PROP(FindHoleTest, FindsOneIffAnElementIsNotHeld, ()) {
  const Shape shape = any_shape();
  check_hole(shape, any_boxes(shape, 12));
}

RC_GTEST_PROP(FindHoleTest, FindsTheOneBoxMissing, ()) {
  const Shape shape = any_shape(1);
  check_hole(shape, nearly_a_partition(shape));
}

RC_GTEST_PROP(CoverageTest, PartitionIffNoOverlapAndNoHole, ()) {
  const Shape shape = any_shape();
  const BoxList boxes = nearly_a_partition(shape);
  RC_ASSERT(testing::is_partition(shape, boxes) == (!find_overlap(boxes) && !find_hole(shape, boxes)));
}

TEST(FindOverlapTest, EmptyBoxesOverlapNothing) {
  EXPECT_EQ(find_overlap({Box({0, 0}, {2, 2}), Box({1, 1}, {0, 1}), Box({1, 1}, {1, 0})}), std::nullopt);
  EXPECT_EQ(find_overlap(BoxList(3)), std::nullopt);
}

TEST(FindOverlapTest, TwoScalarsOverlap) {
  BoxList scalars(0);
  scalars.push_back(Box());
  EXPECT_EQ(find_overlap(scalars), std::nullopt);
  scalars.push_back(Box());
  EXPECT_EQ(find_overlap(scalars), std::pair(std::size_t{0}, std::size_t{1}));
}

TEST(FindHoleTest, AScalarNeedsItsOneBox) {
  BoxList scalars(0);
  EXPECT_EQ(find_hole(Shape{}, scalars), Box());
  scalars.push_back(Box());
  EXPECT_EQ(find_hole(Shape{}, scalars), std::nullopt);
}

TEST(FindHoleTest, OneBoxMustBeTheShape) {
  const Shape shape = {3, 4};
  EXPECT_EQ(find_hole(shape, {Box({0, 0}, {3, 4})}), std::nullopt);
  EXPECT_EQ(find_hole(shape, {Box({0, 0}, {3, 3})}), Box({0, 3}, {3, 1}));
  EXPECT_EQ(find_hole(shape, {Box({1, 0}, {2, 4})}), Box({0, 0}, {1, 4}));
  EXPECT_EQ(find_hole(shape, {Box({0, 0}, {0, 4})}), Box({0, 0}, {3, 4}));
  EXPECT_EQ(find_hole(shape, {Box({1, 0}, {3, 4})}), Box({0, 0}, {1, 4})) << "not valid, but no shape either";
}

TEST(FindHoleTest, AnEmptyShapeHasNone) { EXPECT_EQ(find_hole(Shape{3, 0}, BoxList(2)), std::nullopt); }

TEST(FindHoleTest, WithoutBoxesTheWholeIsOne) { EXPECT_EQ(find_hole(Shape{3, 4}, BoxList()), Box({0, 0}, {3, 4})); }

TEST(FindHoleTest, NamesTheMissingShard) {
  BoxList boxes(2);
  for (std::int64_t i = 0; i < 8; ++i) {
    if (i != 5) boxes.push_back(Box({4 * i, 0}, {4, 16}));
  }
  EXPECT_EQ(find_hole(Shape{32, 16}, boxes), Box({20, 0}, {4, 16}));
}

TEST(FindHoleTest, NumberOfElementsDoesNotMatter) {
  constexpr std::int64_t kSide = std::int64_t{1} << 20;
  const Shape shape = {kSide, kSide, kSide};  // 2^60 elements
  BoxList boxes(3);
  for (const std::int64_t x : {0, 1}) {
    for (const std::int64_t y : {0, 1}) {
      for (const std::int64_t z : {0, 1}) {
        boxes.push_back(Box({x * kSide / 2, y * kSide / 2, z * kSide / 2}, {kSide / 2, kSide / 2, kSide / 2}));
      }
    }
  }
  EXPECT_EQ(find_overlap(boxes), std::nullopt);
  EXPECT_EQ(find_hole(shape, boxes), std::nullopt);
  const Shape wider = {kSide, kSide, kSide + 1};
  EXPECT_EQ(find_hole(wider, boxes), Box({0, 0, kSide}, {kSide, kSide, 1}));
  boxes.push_back(Box({7, 7, 7}, {1, 1, 1}));
  EXPECT_EQ(find_overlap(boxes), std::pair(std::size_t{0}, std::size_t{8}));
}

// Five boxes around the middle of a cube. Every plane divides one of them.
TEST(CoverageTest, BoxesThatNoPlaneSeparates) {
  BoxList boxes = {Box({0, 0, 0}, {1, 1, 2}), Box({1, 0, 0}, {2, 1, 1}), Box({2, 1, 0}, {1, 2, 1}),
                   Box({0, 1, 0}, {1, 1, 1}), Box({0, 2, 0}, {2, 1, 1}), Box({1, 1, 0}, {1, 1, 3}),
                   Box({1, 0, 1}, {2, 1, 2}), Box({0, 0, 2}, {1, 2, 1}), Box({0, 1, 1}, {1, 2, 1}),
                   Box({0, 2, 2}, {2, 1, 1}), Box({1, 2, 1}, {2, 1, 1}), Box({2, 1, 1}, {1, 1, 2})};
  EXPECT_EQ(find_overlap(boxes), std::nullopt);
  EXPECT_EQ(find_hole(Shape{3, 3, 3}, boxes), Box({2, 2, 2}, {1, 1, 1}));
  boxes.push_back(Box({2, 2, 2}, {1, 1, 1}));
  EXPECT_EQ(find_hole(Shape{3, 3, 3}, boxes), std::nullopt);
}

// The test is that these finish: comparing pairs would take hours.
constexpr auto kStride = static_cast<std::int64_t>(testing::stride_if_sanitized(10));

void expect_partition_at_scale(const Shape& shape, const BoxList& boxes) {
  EXPECT_EQ(find_overlap(boxes), std::nullopt);
  EXPECT_EQ(find_hole(shape, boxes), std::nullopt);
  BoxList missing_one(boxes.rank());
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    if (i != boxes.size() / 2) missing_one.push_back(boxes[i]);
  }
  EXPECT_EQ(find_hole(shape, missing_one), Box(boxes[boxes.size() / 2]));
  BoxList one_twice = boxes;
  one_twice.push_back(boxes[boxes.size() / 3]);
  EXPECT_EQ(find_overlap(one_twice), std::pair(boxes.size() / 3, boxes.size()));
}

TEST(CoverageScaleTest, AMillionRowShards) {
  const Shape shape = {1'000'000 / kStride, 4096};
  expect_partition_at_scale(shape, chunk_boxes(shape, 0, shape[0]));
}

TEST(CoverageScaleTest, AMillionRowShardsOfRankFour) {
  const Shape shape = {1'000'000 / kStride, 3, 3, 64};
  expect_partition_at_scale(shape, chunk_boxes(shape, 0, shape[0]));
}

TEST(CoverageScaleTest, AMillionInATwoDimensionalMesh) {
  expect_partition_at_scale({8000 / kStride, 8000}, mesh_boxes({1000 / kStride, 1000}, 8));
}

TEST(CoverageScaleTest, AMillionInAThreeDimensionalMesh) {
  expect_partition_at_scale({200 / kStride, 200, 200}, mesh_boxes({100 / kStride, 100, 100}, 2));
}

TEST(CoverageScaleTest, FlatIntervalsOfManyRanks) {
  const Shape shape = {1000, 100, 50, 20};
  constexpr std::int64_t kElements = 1000 * 100 * 50 * 20, kRanks = 300'000 / kStride;
  BoxList boxes(4);
  for (std::int64_t rank = 0; rank < kRanks; ++rank) {
    for (const Box& box : boxes_of_flat_interval(shape, kElements * rank / kRanks, kElements * (rank + 1) / kRanks)) {
      boxes.push_back(box);
    }
  }
  EXPECT_EQ(find_overlap(boxes), std::nullopt);
  EXPECT_EQ(find_hole(shape, boxes), std::nullopt);
}

TEST(CoverageScaleTest, AHundredThousandThatAllOverlap) {
  BoxList boxes(3);
  for (std::int64_t i = 0; i < 100'000; ++i)
    boxes.push_back(Box({i, i * 7919 % 100'000, 0}, {100'000, 100'000, i + 1}));
  EXPECT_TRUE(find_overlap(boxes).has_value());
}

}  // namespace
}  // namespace tessera
