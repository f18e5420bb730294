#include "tessera/base/dtype.h"

#include <gtest/gtest.h>

#include "support/error_matchers.h"

namespace tessera {
namespace {

TEST(DTypeTest, EveryNameLeadsBackToItsDType) {
  for (std::size_t i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(find_dtype(dtype_name(dtype)), dtype);
    EXPECT_EQ(find_dtype("torch." + std::string(dtype_name(dtype))), dtype);
    EXPECT_GE(dtype_size(dtype), 1);
  }
}

// The values of `torch.<name>.itemsize` in PyTorch 2.14.
TEST(DTypeTest, SizesAreThoseOfPyTorch) {
  for (const auto& [name, size] : std::initializer_list<std::pair<const char*, int>>{{"complex128", 16},
                                                                                     {"complex64", 8},
                                                                                     {"complex32", 4},
                                                                                     {"bcomplex32", 4},
                                                                                     {"float64", 8},
                                                                                     {"float32", 4},
                                                                                     {"bfloat16", 2},
                                                                                     {"float16", 2},
                                                                                     {"int64", 8},
                                                                                     {"uint64", 8},
                                                                                     {"uint16", 2},
                                                                                     {"bool", 1},
                                                                                     {"qint32", 4},
                                                                                     {"quint4x2", 1},
                                                                                     {"bits16", 2},
                                                                                     {"bits1x8", 1},
                                                                                     {"int4", 1},
                                                                                     {"float8_e8m0fnu", 1},
                                                                                     {"float4_e2m1fn_x2", 1}}) {
    EXPECT_EQ(dtype_size(dtype_from_name(name)), size) << name;
  }
}

TEST(DTypeTest, AliasesArePyTorchs) {
  EXPECT_EQ(find_dtype("half"), DType::float16);
  EXPECT_EQ(find_dtype("torch.double"), DType::float64);
  EXPECT_EQ(find_dtype("long"), DType::int64);
  EXPECT_EQ(find_dtype("cfloat"), DType::complex64);
}

TEST(DTypeTest, UnknownNameIsRefusedByName) {
  EXPECT_EQ(find_dtype("float7"), std::nullopt);
  EXPECT_EQ(find_dtype(""), std::nullopt);
  EXPECT_ERROR(dtype_from_name("float7"), ErrorCode::unsupported, "unknown dtype 'float7'");
}

}  // namespace
}  // namespace tessera
