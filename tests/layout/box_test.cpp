#include "tessera/layout/box.h"

#include <gtest/gtest.h>

#include <limits>
#include <sstream>

#include "support/box_generators.h"
#include "support/element_oracle.h"

namespace tessera {
namespace {

using testing::any_between;
using testing::any_box;
using testing::any_shape;
using testing::element_set;
using testing::Shape;

std::set<testing::Element> shared_elements(const Box& a, const Box& b) {
  std::set<testing::Element> shared;
  const std::set<testing::Element> of_b = element_set(b);
  for (const testing::Element& element : element_set(a)) {
    if (of_b.contains(element)) shared.insert(element);
  }
  return shared;
}

RC_GTEST_PROP(BoxTest, VolumeIsTheNumberOfElements, ()) {
  const Box box = any_box(any_shape());
  RC_ASSERT(volume(box) == static_cast<std::int64_t>(element_set(box).size()));
  RC_ASSERT(is_empty(box) == element_set(box).empty());
}

RC_GTEST_PROP(BoxTest, OverlapIsSharingAnElement, ()) {
  const Shape shape = any_shape();
  const Box a = any_box(shape), b = any_box(shape);
  RC_ASSERT(overlaps(a, b) == !shared_elements(a, b).empty());
}

RC_GTEST_PROP(BoxTest, IntersectionIsWhatIsShared, ()) {
  const Shape shape = any_shape();
  const Box a = any_box(shape), b = any_box(shape);
  const std::optional<Box> shared = intersect(a, b);
  RC_ASSERT((shared ? element_set(*shared) : std::set<testing::Element>()) == shared_elements(a, b));
}

RC_GTEST_PROP(BoxTest, DifferenceAndIntersectionPartition, ()) {
  const Shape shape = any_shape();
  const Box a = any_box(shape), b = any_box(shape);
  const std::vector<Box> rest = subtract(a, b);
  RC_ASSERT(rest.size() <= 2 * a.rank() + 1);
  std::set<testing::Element> seen = shared_elements(a, b);
  std::int64_t count = static_cast<std::int64_t>(seen.size());
  for (const Box& box : rest) {
    RC_ASSERT(!is_empty(box));
    const std::set<testing::Element> elements = element_set(box);
    seen.insert(elements.begin(), elements.end());
    count += volume(box);
  }
  RC_ASSERT(seen == element_set(a));
  RC_ASSERT(count == volume(a));
}

RC_GTEST_PROP(BoxTest, OverlapIffIntersectionHasVolume, ()) {
  const Shape shape = any_shape();
  const Box a = any_box(shape), b = any_box(shape);
  const std::optional<Box> shared = intersect(a, b);
  RC_ASSERT(overlaps(a, b) == (shared && volume(*shared) > 0));
}

RC_GTEST_PROP(BoxTest, ContainsIffEmptyOrEqualToIntersection, ()) {
  const Shape shape = any_shape();
  const Box outer = any_box(shape);
  const Box inner = *rc::gen::arbitrary<bool>() ? any_box(shape) : intersect(outer, any_box(shape)).value_or(outer);
  RC_ASSERT(contains(outer, inner) == (is_empty(inner) || intersect(outer, inner) == inner));
  RC_ASSERT(contains(outer, inner) == (shared_elements(outer, inner) == element_set(inner)));
}

RC_GTEST_PROP(BoxTest, ValidIffWithinTheShape, ()) {
  const Shape shape = any_shape();
  Box box = any_box(shape);
  RC_ASSERT(is_valid(box, shape));
  if (shape.empty()) return;
  const auto d = static_cast<std::size_t>(any_between(0, static_cast<std::int64_t>(shape.size()) - 1));
  box.offsets[d] = any_between(-2, 7);
  box.sizes[d] = any_between(-2, 7);
  const bool within = box.offsets[d] >= 0 && box.sizes[d] >= 0 && box.offsets[d] + box.sizes[d] <= shape[d];
  RC_ASSERT(is_valid(box, shape) == within);
}

TEST(BoxTest, ValidityDoesNotOverflow) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
  const Shape shape = {kMax};
  EXPECT_TRUE(is_valid(Box({0}, {kMax}), shape));
  EXPECT_TRUE(is_valid(Box({kMax}, {0}), shape));
  EXPECT_FALSE(is_valid(Box({kMax}, {1}), shape));
  EXPECT_FALSE(is_valid(Box({kMax}, {kMax}), shape));
  EXPECT_FALSE(is_valid(Box({1}, {kMin}), shape));
  EXPECT_FALSE(is_valid(Box({kMin}, {kMin}), shape));
  EXPECT_FALSE(is_valid(Box({kMin}, {1}), shape));
}

TEST(BoxTest, ABoxOfAnotherRankIsNotValid) {
  EXPECT_FALSE(is_valid(Box({0}, {1}), Shape{}));
  EXPECT_FALSE(is_valid(Box(), Shape{1}));
  EXPECT_FALSE(is_valid(Box({0, 0}, {1}), Shape{1}));
  EXPECT_FALSE(is_valid(Box({0}, {1, 1}), Shape{1}));
}

TEST(BoxTest, AScalarHoldsOneElement) {
  const Box scalar;
  EXPECT_EQ(volume(scalar), 1);
  EXPECT_FALSE(is_empty(scalar));
  EXPECT_TRUE(overlaps(scalar, scalar));
  EXPECT_EQ(intersect(scalar, scalar), scalar);
  EXPECT_TRUE(is_valid(scalar, Shape{}));
}

TEST(BoxTest, PrintsHalfOpenIntervals) {
  EXPECT_EQ(to_string(Box({0, 2}, {4, 4})), "[0, 4)x[2, 6)");
  EXPECT_EQ(to_string(Box()), "[]");
  EXPECT_EQ(shape_to_string(Shape{2, 3}), "[2, 3]");
  EXPECT_EQ(shape_to_string(Shape{}), "[]");
  std::ostringstream out;
  out << Box({1}, {2});
  EXPECT_EQ(out.str(), "[1, 3)");
}

TEST(BoxTest, EqualityLooksAtOffsetsAndSizes) {
  EXPECT_EQ(Box({0, 1}, {2, 3}), Box({0, 1}, {2, 3}));
  EXPECT_FALSE(Box({0, 1}, {2, 3}) == Box({0, 2}, {2, 3}));
  EXPECT_FALSE(BoxView(Box({0}, {2})) == BoxView(Box({0}, {3})));
  EXPECT_FALSE(BoxView(Box({0}, {2})) == BoxView(Box({0, 0}, {2, 2})));
}

RC_GTEST_PROP(BoxListTest, HoldsWhatWasPushed, ()) {
  const Shape shape = any_shape();
  std::vector<Box> boxes;
  BoxList list(shape.size());
  for (std::int64_t n = any_between(0, 6); n > 0; --n) {
    boxes.push_back(any_box(shape));
    list.push_back(boxes.back());
  }
  RC_ASSERT(list.size() == boxes.size());
  RC_ASSERT(list.rank() == shape.size());
  for (std::size_t i = 0; i < boxes.size(); ++i) RC_ASSERT(Box(list[i]) == boxes[i]);
}

TEST(BoxListTest, TakesItsRankFromTheFirstBox) {
  const BoxList boxes = {Box({0, 0}, {1, 2}), Box({1, 0}, {1, 2})};
  EXPECT_EQ(boxes.rank(), 2u);
  EXPECT_EQ(boxes.size(), 2u);
  EXPECT_EQ(Box(boxes[1]), Box({1, 0}, {1, 2}));
}

}  // namespace
}  // namespace tessera
