#include "tessera/layout/byte_ranges.h"

#include <gtest/gtest.h>

#include "support/box_generators.h"
#include "support/element_oracle.h"

namespace tessera {
namespace {

using testing::any_between;
using testing::any_box;
using testing::any_shape;
using testing::elements;
using testing::flat_index;
using testing::Shape;

// A chunk somewhere in a tensor, and a box inside it.
struct Inside {
  Box chunk, box;
};

Inside any_inside() {
  Inside inside;
  inside.chunk = Box::full(any_shape());
  inside.box = any_box(inside.chunk.sizes);
  for (std::size_t d = 0; d < inside.chunk.rank(); ++d) {
    const std::int64_t offset = any_between(0, 9);
    inside.chunk.offsets[d] += offset;
    inside.box.offsets[d] += offset;
  }
  return inside;
}

RC_GTEST_PROP(ByteRangesTest, HoldTheBytesOfTheBoxInOrder, ()) {
  const auto [chunk, box] = any_inside();
  const std::int64_t element_bytes = any_between(1, 8);
  std::vector<std::int64_t> expected, found;
  for (const testing::Element& element : elements(box)) {
    const std::int64_t begin = flat_index(element, chunk) * element_bytes;
    for (std::int64_t i = 0; i < element_bytes; ++i) expected.push_back(begin + i);
  }
  for (const ByteRange& range : byte_ranges(box, chunk, element_bytes)) {
    for (std::int64_t i = 0; i < range.length_bytes; ++i) found.push_back(range.offset_bytes + i);
  }
  RC_ASSERT(found == expected);
}

RC_GTEST_PROP(ByteRangesTest, AreDisjointInOrderAndNotAdjacent, ()) {
  const auto [chunk, box] = any_inside();
  std::int64_t end = -1;
  for (const ByteRange& range : byte_ranges(box, chunk, 4)) {
    RC_ASSERT(range.offset_bytes > end);
    RC_ASSERT(range.length_bytes > 0);
    end = range.offset_bytes + range.length_bytes;
  }
}

RC_GTEST_PROP(ByteRangesTest, TotalIsTheVolume, ()) {
  const auto [chunk, box] = any_inside();
  const std::int64_t element_bytes = any_between(1, 8);
  std::int64_t total = 0;
  for (const ByteRange& range : byte_ranges(box, chunk, element_bytes)) total += range.length_bytes;
  RC_ASSERT(total == volume(box) * element_bytes);
}

RC_GTEST_PROP(ByteRangesTest, ContiguousIffAtMostOneRange, ()) {
  const auto [chunk, box] = any_inside();
  RC_ASSERT(is_contiguous_in(box, chunk) == (byte_ranges(box, chunk, 2).size() <= 1));
}

TEST(ByteRangesTest, RowsOfAChunkAreOneRangeColumnsAreMany) {
  const Box chunk({8, 0}, {4, 10});
  EXPECT_EQ(byte_ranges(Box({9, 0}, {2, 10}), chunk, 4), (std::vector<ByteRange>{{40, 80}}));
  EXPECT_EQ(byte_ranges(Box({9, 3}, {2, 5}), chunk, 4), (std::vector<ByteRange>{{52, 20}, {92, 20}}));
  EXPECT_EQ(byte_ranges(Box(), Box(), 8), (std::vector<ByteRange>{{0, 8}}));
}

TEST(RowMajorStridesTest, LastIsOneAndZeroSizesCountAsOne) {
  EXPECT_EQ(row_major_strides(Shape{2, 3, 4}), (Shape{12, 4, 1}));
  EXPECT_EQ(row_major_strides(Shape{2, 0, 4}), (Shape{4, 4, 1}));
  EXPECT_EQ(row_major_strides(Shape{}), Shape{});
}

struct Split {
  Box box;
  std::int64_t element_bytes, limit_bytes;
  std::vector<Box> pieces;
};

Split any_split() {
  Split split;
  split.box = any_inside().box;
  split.element_bytes = any_between(1, 4);
  split.limit_bytes = any_between(0, 400);
  split.pieces = split_row_major(split.box, split.element_bytes, split.limit_bytes);
  return split;
}

RC_GTEST_PROP(SplitRowMajorTest, PiecesHoldTheBoxOnceAndInOrder, ()) {
  const Split split = any_split();
  std::int64_t next = 0;
  for (const Box& piece : split.pieces) {
    for (const testing::Element& element : elements(piece)) RC_ASSERT(flat_index(element, split.box) == next++);
  }
  RC_ASSERT(next == volume(split.box));
}

RC_GTEST_PROP(SplitRowMajorTest, PiecesAreContiguousInTheBox, ()) {
  const Split split = any_split();
  for (const Box& piece : split.pieces) RC_ASSERT(is_contiguous_in(piece, split.box));
}

RC_GTEST_PROP(SplitRowMajorTest, NoPieceIsEmptyOrAboveTheLimit, ()) {
  const Split split = any_split();
  for (const Box& piece : split.pieces) {
    const std::int64_t size = volume(piece);
    RC_ASSERT(size >= 1);
    RC_ASSERT(size == 1 || size * split.element_bytes <= split.limit_bytes);
  }
}

// A piece and the step after it exceed the limit together, unless another index begins between them.
RC_GTEST_PROP(SplitRowMajorTest, PiecesAreAsLargeAsTheLimitAllows, ()) {
  const Split split = any_split();
  for (std::size_t i = 0; i + 1 < split.pieces.size(); ++i) {
    const Box& piece = split.pieces[i];
    std::size_t d = 0;  // the dimension that was split: pieces are one step wide before it
    while (d + 1 < piece.rank() && piece.sizes[d] == 1 && split.pieces[i + 1].offsets[d] == piece.offsets[d]) ++d;
    const std::int64_t end = piece.offsets[d] + piece.sizes[d];
    if (split.pieces[i + 1].offsets[d] == piece.offsets[d] || end == split.box.offsets[d] + split.box.sizes[d])
      continue;
    const std::int64_t step = volume(piece) / piece.sizes[d];
    RC_ASSERT((volume(piece) + step) * split.element_bytes > split.limit_bytes);
  }
}

TEST(SplitRowMajorTest, CutsTheOutermostDimensionThatCanBe) {
  const Box box({10, 0}, {7, 100});
  EXPECT_EQ(split_row_major(box, 4, 4000), std::vector{box});
  EXPECT_EQ(split_row_major(box, 4, 1500),
            (std::vector{Box({10, 0}, {3, 100}), Box({13, 0}, {3, 100}), Box({16, 0}, {1, 100})}));
  EXPECT_EQ(split_row_major(Box({0, 0}, {2, 100}), 4, 260),
            (std::vector{Box({0, 0}, {1, 65}), Box({0, 65}, {1, 35}), Box({1, 0}, {1, 65}), Box({1, 65}, {1, 35})}));
  EXPECT_EQ(split_row_major(Box(), 8, 1), std::vector{Box()});
  EXPECT_TRUE(split_row_major(Box({0, 0}, {3, 0}), 4, 100).empty());
}

}  // namespace
}  // namespace tessera
