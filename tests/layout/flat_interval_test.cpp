#include "tessera/layout/flat_interval.h"

#include <gtest/gtest.h>

#include <limits>

#include "support/box_generators.h"
#include "support/element_oracle.h"
#include "support/error_matchers.h"
#include "tessera/layout/byte_ranges.h"

namespace tessera {
namespace {

using testing::any_between;
using testing::any_shape;
using testing::elements;
using testing::flat_index;
using testing::Shape;

struct IntervalOfShape {
  Shape shape;
  std::int64_t begin, end;
  std::vector<Box> boxes;
};

IntervalOfShape any_interval() {
  IntervalOfShape interval;
  interval.shape = any_shape();
  const std::int64_t numel = volume(Box::full(interval.shape));
  interval.begin = any_between(0, numel);
  interval.end = any_between(interval.begin, numel);
  interval.boxes = boxes_of_flat_interval(interval.shape, interval.begin, interval.end);
  return interval;
}

RC_GTEST_PROP(FlatIntervalTest, BoxesHoldTheIntervalOnceAndInOrder, ()) {
  const IntervalOfShape interval = any_interval();
  std::int64_t next = interval.begin;
  for (const Box& box : interval.boxes) {
    RC_ASSERT(is_valid(box, interval.shape));
    RC_ASSERT(!is_empty(box));
    for (const testing::Element& element : elements(box)) {
      RC_ASSERT(flat_index(element, Box::full(interval.shape)) == next++);
    }
  }
  RC_ASSERT(next == interval.end);
}

RC_GTEST_PROP(FlatIntervalTest, EachBoxIsContiguousInTheTensor, ()) {
  const IntervalOfShape interval = any_interval();
  for (const Box& box : interval.boxes) RC_ASSERT(is_contiguous_in(box, Box::full(interval.shape)));
}

RC_GTEST_PROP(FlatIntervalTest, AtMostTwiceTheRankLessOne, ()) {
  const IntervalOfShape interval = any_interval();
  RC_ASSERT(interval.boxes.size() <= std::max<std::size_t>(2 * interval.shape.size(), 2) - 1);
}

TEST(FlatIntervalTest, PartialRowsThenPlanesThenPartialRows) {
  const std::vector<Box> expected = {Box({0, 1, 3}, {1, 1, 1}), Box({0, 2, 0}, {1, 1, 4}), Box({1, 0, 0}, {2, 3, 4}),
                                     Box({3, 0, 0}, {1, 1, 4}), Box({3, 1, 0}, {1, 1, 2})};
  EXPECT_EQ(boxes_of_flat_interval(Shape{5, 3, 4}, 7, 42), expected);
}

TEST(FlatIntervalTest, TheWholeIsOneBox) {
  EXPECT_EQ(boxes_of_flat_interval(Shape{5, 3, 4}, 0, 60), std::vector{Box({0, 0, 0}, {5, 3, 4})});
  EXPECT_EQ(boxes_of_flat_interval(Shape{}, 0, 1), std::vector{Box()});
}

TEST(FlatIntervalTest, AnEmptyIntervalHasNoBox) {
  EXPECT_TRUE(boxes_of_flat_interval(Shape{5, 3}, 7, 7).empty());
  EXPECT_TRUE(boxes_of_flat_interval(Shape{5, 0}, 0, 0).empty());
  EXPECT_TRUE(boxes_of_flat_interval(Shape{}, 1, 1).empty());
}

TEST(FlatIntervalTest, OutsideOfTheTensorIsAnError) {
  const Shape shape = {2, 3};
  EXPECT_ERROR(boxes_of_flat_interval(shape, 3, 9), ErrorCode::invalid_argument, "[3, 9)", "[2, 3]", "end <= 6");
  EXPECT_ERROR(boxes_of_flat_interval(shape, -1, 2), ErrorCode::invalid_argument, "[-1, 2)", "0 <= begin");
  EXPECT_ERROR(boxes_of_flat_interval(shape, 4, 3), ErrorCode::invalid_argument, "[4, 3)", "begin <= end");
  EXPECT_ERROR(boxes_of_flat_interval(Shape{}, 0, 2), ErrorCode::invalid_argument, "[0, 2)", "end <= 1");
}

TEST(FlatIntervalTest, AShapeThatOverflowsIsAnError) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  EXPECT_ERROR(boxes_of_flat_interval(Shape{kMax, 2}, 0, 1), ErrorCode::corrupt, "number of elements", "overflows");
}

}  // namespace
}  // namespace tessera
