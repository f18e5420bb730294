#include "tessera/checkpoint/inspect/tensor_slice.h"

#include <gtest/gtest.h>

#include <cstring>

#include "support/box_generators.h"
#include "support/error_matchers.h"
#include "support/safetensors_file.h"
#include "support/torch_file.h"

namespace tessera::checkpoint {
namespace {

using testing::SafetensorsFile;
using testing::TemporaryDirectory;
using testing::TorchFile;
using Dim = TensorSlice::Dim;

TEST(ParseSliceTest, SubscriptsMeanWhatTheyMeanInPython) {
  const std::vector<std::int64_t> shape = {5, 7, 3};
  const Dim first{0, 5, 1, true}, second{0, 7, 1, true}, third{0, 3, 1, true};
  const std::vector<std::pair<std::string, std::vector<Dim>>> cases = {
      {"[...]", {first, second, third}},
      {"[:]", {first, second, third}},
      {"[2]", {{2, 1, 1, false}, second, third}},
      {"[-1]", {{4, 1, 1, false}, second, third}},
      {"[1:3]", {{1, 2, 1, true}, second, third}},
      {"[ 1 : 3 , : , -1 ]", {{1, 2, 1, true}, second, {2, 1, 1, false}}},
      {"[..., 0]", {first, second, {0, 1, 1, false}}},
      {"[0, ...]", {{0, 1, 1, false}, second, third}},
      {"[0, ..., 1:]", {{0, 1, 1, false}, second, {1, 2, 1, true}}},
      {"[0, 1, 2]", {{0, 1, 1, false}, {1, 1, 1, false}, {2, 1, 1, false}}},
      {"[0, 1, ..., 2]", {{0, 1, 1, false}, {1, 1, 1, false}, {2, 1, 1, false}}},
      {"[-2:]", {{3, 2, 1, true}, second, third}},
      {"[:-2]", {{0, 3, 1, true}, second, third}},
      {"[:100]", {first, second, third}},
      {"[-100:2]", {{0, 2, 1, true}, second, third}},
      {"[4:2]", {{4, 0, 1, true}, second, third}},
      {"[::2]", {{0, 3, 2, true}, second, third}},
      {"[1::3]", {{1, 2, 3, true}, second, third}},
      {"[:, ::7]", {first, {0, 1, 7, true}, third}},
      {"[::9223372036854775807]", {{0, 1, INT64_MAX, true}, second, third}},
      {"[0,]", {{0, 1, 1, false}, second, third}},
      {"1:2, 0", {{1, 1, 1, true}, {0, 1, 1, false}, third}},
  };
  for (const auto& [text, dims] : cases) EXPECT_EQ(parse_slice(text, shape).dims, dims) << text;
  EXPECT_EQ(parse_slice("[1:3, :, -1]", shape).shape(), (std::vector<std::int64_t>{2, 7}));
  EXPECT_EQ(parse_slice("[1:3, :, -1]", shape).elements(), 14);
  EXPECT_TRUE(parse_slice("[...]", {}).dims.empty());
  EXPECT_EQ(TensorSlice::full({INT64_MAX, 4, 0}).elements(), 0);
}

TEST(ParseSliceTest, WhatIsNoSubscriptIsRefused) {
  const std::vector<std::int64_t> shape = {5, 7};
  for (const std::string text : {"", "[]", "[a]", "[1.5]", "[0:1:1:1]", "[::0]", "[::-1]", "[,]", "[0 1]", "[None]",
                                 "[[0]]", "[+1]", "[99999999999999999999]", "[\x1b]", "["}) {
    EXPECT_ERROR(parse_slice(text, shape), ErrorCode::invalid_argument, "slice '", "expected for each");
  }
  EXPECT_ERROR(parse_slice("[0, 0, 0]", shape), ErrorCode::invalid_argument, "found 3 dimensions", "[5, 7]");
  EXPECT_ERROR(parse_slice("[..., ...]", shape), ErrorCode::invalid_argument, "more than one '...'");
  EXPECT_ERROR(parse_slice("[5]", shape), ErrorCode::invalid_argument, "index 5 in dimension 0", "from -5 to 4");
  EXPECT_ERROR(parse_slice("[:, -8]", shape), ErrorCode::invalid_argument, "index -8 in dimension 1");
  EXPECT_ERROR(parse_slice("[0]", {}), ErrorCode::invalid_argument, "found 1 dimensions");
  EXPECT_ERROR(parse_slice("[0]", {0}), ErrorCode::invalid_argument, "index 0");
}

Bytes read_all_of(const TensorReader& reader, const TensorSlice& slice, DType dtype, std::int64_t limit) {
  Bytes out;
  read_slice(reader, slice, dtype, limit, [&](ByteView elements) {
    EXPECT_LE(elements.size(), static_cast<std::size_t>(std::max(limit, dtype_size(dtype))));
    append(out, elements);
  });
  return out;
}

RC_GTEST_PROP(ReadSliceProperty, TheElementsAreThoseOfTheSubscript, ()) {
  const testing::Shape shape = testing::any_shape();
  const std::int64_t count = volume(Box::full(shape));
  std::vector<std::int32_t> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::int32_t>(i);
  const TemporaryDirectory directory;
  SafetensorsFile file;
  file.add("t", DType::int32, shape, values);
  file.write(directory / "a.safetensors");
  const auto checkpoint = Checkpoint::open(directory / "a.safetensors");
  const TensorReader reader(checkpoint, 0);

  TensorSlice slice = TensorSlice::full(shape);
  for (std::size_t d = 0; d < shape.size(); ++d) {
    Dim& dim = slice.dims[d];
    dim.begin = testing::any_between(0, shape[d]);
    dim.step = testing::any_between(1, 4);
    const std::int64_t room = shape[d] - dim.begin;
    dim.size = room == 0 ? 0 : testing::any_between(0, (room - 1) / dim.step + 1);
  }
  std::vector<std::int32_t> expected;
  std::vector<std::int64_t> index(shape.size(), 0);
  for (std::int64_t left = slice.elements(); left > 0; --left) {
    std::int64_t at = 0;
    for (std::size_t d = 0; d < shape.size(); ++d)
      at = at * shape[d] + slice.dims[d].begin + index[d] * slice.dims[d].step;
    expected.push_back(static_cast<std::int32_t>(at));
    for (std::size_t d = shape.size(); d-- > 0;) {
      if (++index[d] < slice.dims[d].size) break;
      index[d] = 0;
    }
  }
  const Bytes found = read_all_of(reader, slice, DType::int32, testing::any_between(1, 200));
  RC_ASSERT(found.size() == expected.size() * 4);
  // Parentheses, since the macro evaluates both sides of a bare ||, and memcmp takes no null.
  RC_ASSERT((found.empty() || std::memcmp(found.data(), expected.data(), found.size()) == 0));
}

class ReadSliceTest : public ::testing::Test {
 protected:
  const TemporaryDirectory directory_;
};

TEST_F(ReadSliceTest, OnlyTheNeededBytesAreRead) {
  SafetensorsFile file;
  file.add("t", DType::float32, {1000, 1000}, std::vector<float>(1000000, 1.0f));
  file.write(directory_ / "a.safetensors");
  const TensorReader reader(Checkpoint::open(directory_ / "a.safetensors"), 0);
  read_all_of(reader, parse_slice("[10:12]", reader.info().shape), DType::float32, 1 << 20);
  EXPECT_EQ(reader.read_bytes(), 8000u);
  read_all_of(reader, parse_slice("[500, 7]", reader.info().shape), DType::float32, 1 << 20);
  EXPECT_EQ(reader.read_bytes(), 8004u);
}

TEST_F(ReadSliceTest, FloatingPointElementsAreCast) {
  TorchFile file;
  file.storages.push_back({0x80, 0x3f, 0x49, 0x40});  // bfloat16: 1, 3.140625
  file.storages.push_back({0x00, 0x80, 0xff});        // float8_e8m0fnu: 2^-127, 2, NaN
  file.storages.push_back({1, 0, 0, 0});
  file.add("b", DType::bfloat16, 0, 0, {2}, {1});
  file.add("e", DType::float8_e8m0fnu, 1, 0, {3}, {1});
  file.add("i", DType::int32, 2, 0, {1}, {1});
  write_new_file(directory_ / "a.pt", file.bytes());
  const auto checkpoint = Checkpoint::open(directory_ / "a.pt");
  const auto floats = [&](std::size_t tensor) {
    const TensorReader reader(checkpoint, tensor);
    const Bytes bytes = read_all_of(reader, TensorSlice::full(reader.info().shape), DType::float32, 4);
    std::vector<float> values(bytes.size() / 4);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  };
  EXPECT_EQ(floats(0), (std::vector<float>{1, 3.140625f}));
  const std::vector<float> scales = floats(1);
  EXPECT_EQ(scales[0], std::ldexp(1.0f, -127));
  EXPECT_EQ(scales[1], 2);
  EXPECT_TRUE(std::isnan(scales[2]));
  EXPECT_ERROR(floats(2), ErrorCode::unsupported, "tensor 'i'", "dtype int32, expected one with a cast to float32");
}

}  // namespace
}  // namespace tessera::checkpoint
