#include "tessera/layout/tensor_view.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>

#include "support/box_generators.h"
#include "support/element_oracle.h"
#include "support/error_matchers.h"
#include "tessera/layout/byte_ranges.h"

namespace tessera {
namespace {

using testing::any_between;
using testing::Shape;

// Which element of which input an element of a view is.
using Origin = std::pair<std::size_t, testing::Element>;

// A view, and what each of its elements is, in row-major order.
struct KnownView {
  TensorView view;
  std::vector<Origin> elements;
};

std::int64_t numel(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies());
}

std::int64_t flat_index(const testing::Element& index, const Shape& shape) {
  const Shape strides = row_major_strides(shape);
  return std::inner_product(index.begin(), index.end(), strides.begin(), std::int64_t{0});
}

KnownView known_input(std::size_t number, const Shape& shape) {
  KnownView known{TensorView::input(number, shape), {}};
  for (const testing::Element& element : testing::elements(Box::full(shape)))
    known.elements.emplace_back(number, element);
  return known;
}

// Returns a view of which element x is the element source(x) of `of`.
template <typename Source>
KnownView derived(const KnownView& of, TensorView view, const Source& source) {
  KnownView result{std::move(view), {}};
  for (const testing::Element& element : testing::elements(Box::full(result.view.shape()))) {
    result.elements.push_back(of.elements[static_cast<std::size_t>(flat_index(source(element), of.view.shape()))]);
  }
  return result;
}

KnownView any_slice(const KnownView& of) {
  const Shape& shape = of.view.shape();
  if (shape.empty()) return of;
  const auto dim = static_cast<std::size_t>(any_between(0, static_cast<std::int64_t>(shape.size()) - 1));
  const std::int64_t begin = any_between(0, shape[dim]);
  const std::int64_t size = any_between(0, shape[dim] - begin);
  return derived(of, of.view.slice(dim, begin, size), [&](testing::Element element) {
    element[dim] += begin;
    return element;
  });
}

KnownView any_permutation(const KnownView& of) {
  std::vector<std::size_t> dims(of.view.shape().size());
  std::iota(dims.begin(), dims.end(), 0);
  for (std::size_t i = dims.size(); i > 1; --i) {
    std::swap(dims[i - 1], dims[static_cast<std::size_t>(any_between(0, static_cast<std::int64_t>(i) - 1))]);
  }
  return derived(of, of.view.permute(dims), [&](const testing::Element& element) {
    testing::Element source(element.size());
    for (std::size_t d = 0; d < dims.size(); ++d) source[dims[d]] = element[d];
    return source;
  });
}

// Divides the elements into dimensions again, at random.
KnownView any_reshape(const KnownView& of) {
  std::int64_t left = numel(of.view.shape());
  Shape shape;
  while (left > 1 && shape.size() < 5) {
    Shape divisors;
    for (std::int64_t size = 1; size <= left; ++size) {
      if (left % size == 0) divisors.push_back(size);
    }
    shape.push_back(divisors[static_cast<std::size_t>(any_between(0, static_cast<std::int64_t>(divisors.size()) - 1))]);
    left /= shape.back();
  }
  shape.push_back(left);
  return {of.view.reshape(shape), of.elements};
}

// Concatenates three slices, of which one may be another's elements.
KnownView any_concatenation(const KnownView& of) {
  const Shape& shape = of.view.shape();
  if (shape.empty()) return of;
  const auto dim = static_cast<std::size_t>(any_between(0, static_cast<std::int64_t>(shape.size()) - 1));
  std::vector<TensorView> parts;
  std::vector<std::int64_t> index;
  for (int part = 0; part < 3; ++part) {
    const std::int64_t begin = any_between(0, shape[dim]);
    const std::int64_t size = any_between(0, shape[dim] - begin);
    parts.push_back(of.view.slice(dim, begin, size));
    for (std::int64_t i = 0; i < size; ++i) index.push_back(begin + i);
  }
  return derived(of, TensorView::concat(parts, dim), [&](testing::Element element) {
    element[dim] = index[static_cast<std::size_t>(element[dim])];
    return element;
  });
}

KnownView any_view() {
  Shape shape(static_cast<std::size_t>(any_between(0, 3)));
  for (std::int64_t& size : shape) size = any_between(1, 6);
  KnownView known = known_input(3, shape);
  if (any_between(0, 1) == 1 && !shape.empty()) {
    const KnownView other = known_input(5, shape);
    known.elements.insert(known.elements.end(), other.elements.begin(), other.elements.end());
    known.view = TensorView::concat({known.view, other.view}, 0);
  }
  for (std::int64_t n = any_between(0, 6); n > 0; --n) {
    const std::int64_t operation = any_between(0, 5);
    known = operation == 0   ? any_slice(known)
            : operation == 1 ? any_concatenation(known)
            : operation <= 3 ? any_permutation(known)
                             : any_reshape(known);
  }
  return known;
}

// Calls f with each element of a lattice, and its place.
template <typename F>
void for_each_element(const Lattice& lattice, const F& f) {
  Shape counts;
  for (const Lattice::Step& step : lattice.steps) counts.push_back(step.count);
  for (const testing::Element& k : testing::elements(Box::full(counts))) {
    testing::Element index = lattice.base;
    std::int64_t place = lattice.out;
    for (std::size_t j = 0; j < k.size(); ++j) {
      index[lattice.steps[j].dim] += k[j] * lattice.steps[j].step;
      place += k[j] * lattice.steps[j].out_stride;
    }
    f(index, place);
  }
}

RC_GTEST_PROP(TensorViewTest, TheElementsOfAnyBoxOfAnyViewAreThoseOfItsInputs, ()) {
  const KnownView known = any_view();
  const Box box = testing::any_box(known.view.shape());
  if (is_empty(box)) return;
  std::map<std::int64_t, Origin> found;  // by place
  known.view.for_each_part(Lattice::of(box, row_major_strides(box.sizes)), [&](std::size_t input, const Lattice& part) {
    for_each_element(part, [&](const testing::Element& index, std::int64_t place) {
      RC_ASSERT(contains(part.bounds(), Box(index, Shape(index.size(), 1))));
      RC_ASSERT(found.try_emplace(place, input, index).second);
    });
  });
  std::map<std::int64_t, Origin> expected;
  for (const testing::Element& element : testing::elements(box)) {
    const auto place = static_cast<std::int64_t>(expected.size());
    expected[place] = known.elements[static_cast<std::size_t>(flat_index(element, known.view.shape()))];
  }
  RC_ASSERT(found == expected);
}

RC_GTEST_PROP(TensorViewTest, ALatticeInMemoryHasTheSameElementsAtTheSamePlaces, ()) {
  const Shape shape = testing::any_shape(1);
  const Box box = testing::any_box(shape);
  if (is_empty(box)) return;
  Lattice lattice = Lattice::of(box, row_major_strides(box.sizes));
  std::vector<Lattice> below, above;
  if (!shape.empty()) {
    split_lattice(lattice, 0, any_between(0, shape[0]), below, above);
    lattice = below.empty() ? above[0] : below[0];
  }
  const Shape origin(shape.size(), 0), strides = row_major_strides(shape);
  std::map<std::int64_t, std::int64_t> expected, found;  // positions by place
  for_each_element(
      lattice, [&](const testing::Element& index, std::int64_t place) { expected[place] = flat_index(index, shape); });
  const LatticeInMemory memory = lattice_in_memory(lattice, origin, strides);
  RC_ASSERT(std::ranges::is_sorted(memory.strides, std::greater()));
  for (const testing::Element& k : testing::elements(Box::full(memory.sizes))) {
    const auto at = [&](const Shape& by) {
      return std::inner_product(k.begin(), k.end(), by.begin(), std::int64_t{0});
    };
    found[memory.out + at(memory.out_strides)] = memory.first + at(memory.strides);
  }
  RC_ASSERT(found == expected);
}

RC_GTEST_PROP(TensorViewTest, BoxesOfAReshapePartitionTheElementsOfTheBox, ()) {
  const Shape from = testing::any_shape(1);
  const KnownView reshaped = any_reshape(known_input(0, from));
  const Box box = testing::any_box(from);
  const auto boxes = reshape_box(box, from, reshaped.view.shape());
  if (!boxes) return;
  std::vector<Origin> found, expected;
  for (const Box& one : *boxes) {
    for (const testing::Element& element : testing::elements(one)) {
      found.push_back(reshaped.elements[static_cast<std::size_t>(flat_index(element, reshaped.view.shape()))]);
    }
  }
  for (const testing::Element& element : testing::elements(box)) expected.emplace_back(0, element);
  std::ranges::sort(found);
  std::ranges::sort(expected);
  RC_ASSERT(found == expected);
}

std::size_t parts_of(const TensorView& view, const Box& box) {
  std::size_t parts = 0;
  view.for_each_part(Lattice::of(box, row_major_strides(box.sizes)), [&](std::size_t, const Lattice&) { ++parts; });
  return parts;
}

TEST(TensorViewTest, RowsOfAQueryWithInterleavedHalvesAreFewParts) {
  // 32 heads of 128, of which the two halves of each are interleaved: as for rotary embeddings.
  const TensorView rows = TensorView::input(0, {32 * 128, 4096}).reshape({32, 64, 2, 4096});
  const TensorView halves = rows.permute({0, 2, 1, 3}).reshape({32 * 128, 4096});
  EXPECT_EQ(parts_of(halves, Box({0, 0}, {4096, 4096})), 1U);
  EXPECT_EQ(parts_of(halves, Box({128, 0}, {512, 4096})), 1U);
  EXPECT_EQ(parts_of(halves, Box({100, 0}, {700, 4096})), 3U);
}

TEST(TensorViewTest, OnePartOfAConcatenationIsReadForABoxWithinIt) {
  std::vector<TensorView> experts;
  experts.reserve(1000);
  for (std::size_t i = 0; i < 1000; ++i) experts.push_back(TensorView::input(i, {1, 8, 8}));
  const TensorView stacked = TensorView::concat(experts, 0);
  EXPECT_EQ(parts_of(stacked, Box({999, 0, 0}, {1, 8, 8})), 1U);
  EXPECT_EQ(parts_of(stacked, Box({500, 0, 0}, {2, 8, 8})), 2U);
  EXPECT_EQ(parts_of(stacked, Box({0, 3, 3}, {1000, 1, 1})), 1000U);
}

TEST(TensorViewTest, ADeepViewIsRefused) {
  const auto deep = [] {
    TensorView view = TensorView::input(0, {2, 3});
    for (int i = 0; i < 1000; ++i) view = view.permute({1, 0});
    return view;
  };
  EXPECT_ERROR(deep(), ErrorCode::unsupported, "a tensor is the result of over 256 operations, expected fewer");
}

}  // namespace
}  // namespace tessera
