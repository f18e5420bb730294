#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "support/paths.h"
#include "tessera/base/file.h"
#include "tessera/format/npy.h"

namespace tessera::npy {
namespace {

TEST(NpyHeaderTest, EqualsThatOfNumPy) {
  struct Case {
    std::string name;
    DType dtype;
    std::vector<std::int64_t> shape;
  };
  const std::vector<Case> cases = {{"float32", DType::float32, {2, 3}}, {"scalar", DType::int64, {}},
                                   {"bool", DType::bool_, {3}},         {"complex64", DType::complex64, {1, 1}},
                                   {"empty", DType::float16, {0, 3}},   {"uint8", DType::uint8, {3}}};
  const std::filesystem::path folder = std::filesystem::path(testing::source_dir()) / "tests/golden/npy";
  for (const Case& one : cases) {
    const Bytes expected = read_file(folder / (one.name + ".npy"));
    const Bytes found = header(one.dtype, one.shape);
    ASSERT_LE(found.size(), expected.size()) << one.name;
    EXPECT_EQ(found, Bytes(expected.begin(), expected.begin() + static_cast<std::ptrdiff_t>(found.size()))) << one.name;
    std::size_t elements = 1;
    for (const std::int64_t size : one.shape) elements *= static_cast<std::size_t>(size);
    EXPECT_EQ(expected.size() - found.size(), elements * static_cast<std::size_t>(dtype_size(one.dtype))) << one.name;
  }
}

TEST(NpyHeaderTest, WhatNumPyLacksIsRefused) {
  for (const DType dtype : {DType::bfloat16, DType::float8_e4m3fn, DType::complex32, DType::bits8}) {
    EXPECT_FALSE(type_string(dtype));
    EXPECT_ERROR(header(dtype, {1}), ErrorCode::unsupported, "NumPy has no dtype " + std::string(dtype_name(dtype)),
                 "expected one that NumPy has");
  }
  EXPECT_ERROR(header(DType::float32, std::vector<std::int64_t>(30000, 1)), ErrorCode::unsupported, "30000 dimensions");
}

}  // namespace
}  // namespace tessera::npy
