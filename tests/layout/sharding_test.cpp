#include "tessera/layout/sharding.h"

#include <gtest/gtest.h>

#include <limits>

#include "support/box_generators.h"
#include "support/element_oracle.h"
#include "support/error_matchers.h"

namespace tessera {
namespace {

using testing::any_between;
using testing::any_shape;
using testing::Shape;

RC_GTEST_PROP(ChunkBoxesTest, BoxesPartitionTheShape, ()) {
  const Shape shape = any_shape();
  const auto rank = static_cast<std::int64_t>(shape.size());
  const std::int64_t dim = rank == 0 ? 0 : any_between(-rank, rank - 1);
  const BoxList boxes = chunk_boxes(shape, dim, any_between(1, 9));
  RC_ASSERT(testing::is_partition(shape, boxes));
}

RC_GTEST_PROP(ChunkBoxesTest, OneValidBoxARank, ()) {
  const Shape shape = any_shape();
  RC_PRE(!shape.empty());
  const std::int64_t ranks = any_between(1, 9);
  const BoxList boxes = chunk_boxes(shape, -1, ranks);
  RC_ASSERT(boxes.size() == static_cast<std::size_t>(ranks));
  for (std::size_t i = 0; i < boxes.size(); ++i) RC_ASSERT(is_valid(boxes[i], shape));
}

// As torch.chunk: 10 rows for 4 ranks are 3, 3, 3, 1; for 6 ranks they are 2, 2, 2, 2, 2 and none.
TEST(ChunkBoxesTest, UnevenRowsAsTorchChunkCutsThem) {
  EXPECT_EQ(chunk_boxes(Shape{10, 2}, 0, 4),
            (BoxList{Box({0, 0}, {3, 2}), Box({3, 0}, {3, 2}), Box({6, 0}, {3, 2}), Box({9, 0}, {1, 2})}));
  EXPECT_EQ(chunk_boxes(Shape{10}, 0, 6),
            (BoxList{Box({0}, {2}), Box({2}, {2}), Box({4}, {2}), Box({6}, {2}), Box({8}, {2}), Box({10}, {0})}));
  EXPECT_EQ(chunk_boxes(Shape{2, 3}, -1, 2), (BoxList{Box({0, 0}, {2, 2}), Box({0, 2}, {2, 1})}));
  EXPECT_EQ(chunk_boxes(Shape{0}, 0, 2), (BoxList{Box({0}, {0}), Box({0}, {0})}));
}

TEST(ChunkBoxesTest, AScalarIsOneBox) { EXPECT_EQ(chunk_boxes(Shape{}, 1, 4), BoxList{Box()}); }

TEST(ChunkBoxesTest, TheLargestSizeDoesNotOverflow) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  const BoxList boxes = chunk_boxes(Shape{kMax}, 0, 2);
  EXPECT_EQ(Box(boxes[0]), Box({0}, {kMax / 2 + 1}));
  EXPECT_EQ(Box(boxes[1]), Box({kMax / 2 + 1}, {kMax / 2}));
}

TEST(ChunkBoxesTest, NoSuchDimensionIsAnError) {
  EXPECT_ERROR(chunk_boxes(Shape{2, 3}, 2, 4), ErrorCode::invalid_argument, "[2, 3]", "dimension 2", "-2 to 1");
  EXPECT_ERROR(chunk_boxes(Shape{2, 3}, -3, 4), ErrorCode::invalid_argument, "dimension -3");
}

TEST(ChunkBoxesTest, NoRanksIsAnError) {
  EXPECT_ERROR(chunk_boxes(Shape{2, 3}, 0, 0), ErrorCode::invalid_argument, "[2, 3]", "0 ranks", "at least 1");
}

}  // namespace
}  // namespace tessera
