// The memory of tensors: each byte once, views as they are.

#include "state/transport/spans.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <set>

#include "support/error_matchers.h"
#include "tessera/state/value.h"

namespace tessera {
namespace {

using Tensors = std::vector<at::Tensor>;

Tensors copies_in(HostCopies& memory, const Tensors& tensors) {
  Tensors copies;
  for (const HostCopy& copy : memory.copy(tensors)) copies.push_back(copy.elements);
  return copies;
}

void expect_copies(const Tensors& tensors, std::uint64_t bytes) {
  HostCopies memory;
  const Tensors copies = copies_in(memory, tensors);
  EXPECT_EQ(memory.size_bytes(), bytes);
  ASSERT_EQ(copies.size(), tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(copies[i].scalar_type(), tensors[i].scalar_type()) << i;
    EXPECT_TRUE(same_bits(copies[i], tensors[i])) << i;
    if (tensors[i].numel() != 0) {
      EXPECT_NE(copies[i].data_ptr(), tensors[i].data_ptr()) << i;
    }
  }
}

// PyTorch: _cast_tensor, _prepare_tensor.
TEST(SpansTest, TheSpanOfATensorIsItsMemoryAsBytes) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kInt, at::kLong, at::kBool, at::kComplexDouble}) {
    const at::Tensor tensor = at::ones({2, 3}, dtype), rows = tensor.slice(0, 1), transposed = tensor.t();
    for (const at::Tensor& view : {tensor, rows, transposed}) {
      const Spans spans = spans_of({view});
      ASSERT_EQ(spans.sources.size(), 1u);
      EXPECT_EQ(spans.sources[0].scalar_type(), at::kByte);
      EXPECT_EQ(spans.sources[0].data_ptr(), view.data_ptr());
      EXPECT_EQ(spans.sources[0].nbytes(), view.nbytes());
      EXPECT_EQ(spans.views[0], (SpanView{0, dtype, 0, view.sizes().vec(), view.strides().vec(), false, false}));
    }
  }
}

TEST(SpansTest, ShapesStridesAndOffsetsAreKept) {
  const at::Tensor base = at::arange(60, at::kFloat).view({3, 4, 5});
  expect_copies({base.permute({2, 0, 1})}, 240);
  expect_copies({base.slice(0, 1, 3)}, 160);
  expect_copies({at::ones({1}).expand({1000})}, 4);
  expect_copies({at::empty({0, 3}), at::scalar_tensor(2.5)}, 4);
  expect_copies({at::ones({2, 3, 4, 4}).to(at::MemoryFormat::ChannelsLast)}, 384);
}

TEST(SpansTest, TensorsWhoseElementsAreFarApartArePacked) {
  const at::Tensor matrix = at::arange(10000, at::kFloat).view({100, 100});
  expect_copies({matrix.select(1, 7)}, 400);
  expect_copies({matrix.slice(0, 0, 100, 10)}, 4000);
  expect_copies({matrix.slice(1, 0, 3), matrix.slice(1, 0, 3), matrix.slice(1, 50, 51)}, 1200 + 400);
}

TEST(SpansTest, WhatOverlapsIsCopiedOnceAndStaysShared) {
  const at::Tensor base = at::arange(100, at::kFloat).view({10, 10});
  const Tensors views = {base, base.view(100), base.slice(0, 2, 8).slice(1, 2, 8), base.slice(1, 0, 5), base.t()};
  expect_copies(views, 400);
  HostCopies memory;
  const Tensors copies = copies_in(memory, views);
  copies[0].fill_(42);
  for (const at::Tensor& copy : copies) EXPECT_TRUE(copy.eq(42).all().item<bool>());
  expect_copies({base.slice(0, 0, 3), base.slice(0, 2, 5), base.slice(0, 7, 9)}, 200 + 80);
  expect_copies({base, at::ones({10, 10})}, 800);
}

TEST(SpansTest, ViewsMayHaveOtherDtypesAndBits) {
  const at::Tensor numbers = at::complex(at::arange(8, at::kDouble), at::ones({8}, at::kDouble));
  expect_copies({numbers, at::view_as_real(numbers), numbers.conj(), at::imag(numbers.conj())}, 128);
  expect_copies({at::imag(numbers.conj())}, 64);
  const at::Tensor bytes = at::arange(64, at::kByte);
  expect_copies({bytes.slice(0, 8, 40).view(at::kLong), bytes.slice(0, 3, 20)}, 40);
}

TEST(SpansTest, MemoryOfEqualSizeIsUsedAgain) {
  HostCopies memory;
  const auto pointers = [&](const Tensors& tensors) {
    std::set<const void*> result;
    for (const at::Tensor& copy : copies_in(memory, tensors)) result.insert(copy.data_ptr());
    return result;
  };
  const at::Tensor a = at::ones({3}), b = at::ones({5}), c = at::ones({5}, at::kInt);
  const std::set<const void*> first = pointers({a, b});
  EXPECT_EQ(pointers({b, a}), first);
  EXPECT_EQ(pointers({a, c}), first);
  EXPECT_EQ(pointers({a, b, c}).size(), 3u);
  EXPECT_EQ(memory.size_bytes(), 52u);
}

TEST(SpansTest, AViewBeyondItsSpanIsRefused) {
  const at::Tensor memory = at::zeros({16}, at::kByte);
  EXPECT_EQ(view_in(memory, {0, at::kFloat, 1, {3}, {1}, false, false}).numel(), 3);
  const std::int64_t large = std::int64_t{1} << 62;
  for (const SpanView& view : std::vector<SpanView>{{0, at::kFloat, 2, {3}, {1}, false, false},
                                                    {0, at::kFloat, 0, {3}, {2}, false, false},
                                                    {0, at::kFloat, -1, {3}, {1}, false, false},
                                                    {0, at::kFloat, 0, {3}, {-1}, false, false},
                                                    {0, at::kFloat, 0, {-3}, {1}, false, false},
                                                    {0, at::kFloat, 0, {3, 3}, {1}, false, false},
                                                    {0, at::kFloat, 0, {5, 5}, {large, large}, false, false}}) {
    EXPECT_ERROR(view_in(memory, view), ErrorCode::corrupt, "");
  }
}

}  // namespace
}  // namespace tessera
