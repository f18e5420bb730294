#include <gtest/gtest.h>

#include <numeric>

#include "support/box_generators.h"
#include "support/element_oracle.h"
#include "tessera/layout/byte_ranges.h"

namespace tessera {
namespace {

using testing::any_between;
using testing::any_shape;
using testing::Shape;

// Returns strides of a memory with the dimensions in any order and gaps between them, without overlap.
Shape any_strides(const Shape& sizes) {
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[static_cast<std::size_t>(any_between(0, static_cast<std::int64_t>(i) - 1))]);
  }
  Shape strides(sizes.size());
  std::int64_t stride = any_between(0, 3) == 0 ? 2 : 1;
  for (const std::size_t d : order) {
    strides[d] = stride;
    stride *= std::max<std::int64_t>(sizes[d], 1) + (any_between(0, 3) == 0 ? 1 : 0);
  }
  return strides;
}

std::int64_t offset_of(const testing::Element& element, const Shape& strides) {
  return std::inner_product(element.begin(), element.end(), strides.begin(), std::int64_t{0});
}

std::size_t extent_bytes(const Shape& sizes, const Shape& strides, std::int64_t element_bytes) {
  std::int64_t last = 0;
  for (std::size_t d = 0; d < sizes.size(); ++d) last += std::max<std::int64_t>(sizes[d] - 1, 0) * strides[d];
  return static_cast<std::size_t>((last + 1) * element_bytes);
}

// Copies with copy_strided and byte by byte. Bytes that are not part of the copy must not change.
bool copies_as_the_oracle(const Shape& sizes, std::int64_t element_bytes, const Shape& source_strides,
                          const Shape& destination_strides) {
  Bytes source(extent_bytes(sizes, source_strides, element_bytes));
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::uint8_t>(i * 151 + i / 251);
  Bytes expected(extent_bytes(sizes, destination_strides, element_bytes), 0xEE);
  Bytes found = expected;
  for (const testing::Element& element : testing::elements(Box::full(sizes))) {
    for (std::int64_t i = 0; i < element_bytes; ++i) {
      const auto to = static_cast<std::size_t>(offset_of(element, destination_strides) * element_bytes + i);
      expected[to] = source[static_cast<std::size_t>(offset_of(element, source_strides) * element_bytes + i)];
    }
  }
  copy_strided(sizes, element_bytes, source.data(), source_strides, found.data(), destination_strides);
  return found == expected;
}

std::int64_t any_element_bytes() { return *rc::gen::element<std::int64_t>(1, 2, 3, 4, 8, 16); }

RC_GTEST_PROP(CopyStridedTest, CopiesEveryElementAndNothingElse, ()) {
  const Shape sizes = any_shape();
  RC_ASSERT(copies_as_the_oracle(sizes, any_element_bytes(), any_strides(sizes), any_strides(sizes)));
}

RC_GTEST_PROP(CopyStridedTest, BetweenRowMajorMemories, ()) {
  const Shape sizes = any_shape(1);
  RC_ASSERT(copies_as_the_oracle(sizes, any_element_bytes(), row_major_strides(sizes), row_major_strides(sizes)));
}

RC_GTEST_PROP(CopyStridedTest, ASourceStrideOfZeroRepeats, ()) {
  const Shape sizes = any_shape(1);
  Shape source_strides = any_strides(sizes);
  for (std::int64_t& stride : source_strides) {
    if (*rc::gen::arbitrary<bool>()) stride = 0;
  }
  RC_ASSERT(copies_as_the_oracle(sizes, any_element_bytes(), source_strides, any_strides(sizes)));
}

// Sizes above that of the transpose's tile, and not multiples of it.
RC_GTEST_PROP(CopyStridedTest, TransposesOfAnySize, ()) {
  const std::int64_t rows = any_between(1, 150), columns = any_between(1, 150), planes = any_between(1, 3);
  const Shape sizes = {planes, rows, columns};
  RC_ASSERT(copies_as_the_oracle(sizes, any_element_bytes(), {rows * columns, 1, rows}, {rows * columns, columns, 1}));
}

TEST(CopyStridedTest, AScalarIsOneElement) {
  const Bytes source = {1, 2, 3, 4};
  Bytes destination(4);
  copy_strided({}, 4, source.data(), {}, destination.data(), {});
  EXPECT_EQ(destination, source);
}

TEST(CopyStridedTest, NothingIsTouchedWhereThereIsNoElement) {
  copy_strided(Shape{3, 0}, 4, nullptr, Shape{1, 1}, nullptr, Shape{1, 1});
}

}  // namespace
}  // namespace tessera
