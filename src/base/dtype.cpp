#include "tessera/base/dtype.h"

#include <utility>

#include "tessera/base/error.h"

namespace tessera {
namespace {

struct Description {
  DType dtype;
  std::string_view name;
  std::int64_t size_bytes;
};

constexpr std::array<Description, kDTypeCount> kDTypes = {{
    {DType::float32, "float32", 4},
    {DType::float64, "float64", 8},
    {DType::float16, "float16", 2},
    {DType::bfloat16, "bfloat16", 2},
    {DType::complex32, "complex32", 4},
    {DType::complex64, "complex64", 8},
    {DType::complex128, "complex128", 16},
    {DType::bcomplex32, "bcomplex32", 4},
    {DType::uint8, "uint8", 1},
    {DType::int8, "int8", 1},
    {DType::int16, "int16", 2},
    {DType::int32, "int32", 4},
    {DType::int64, "int64", 8},
    {DType::bool_, "bool", 1},
    {DType::uint16, "uint16", 2},
    {DType::uint32, "uint32", 4},
    {DType::uint64, "uint64", 8},
    {DType::float8_e4m3fn, "float8_e4m3fn", 1},
    {DType::float8_e4m3fnuz, "float8_e4m3fnuz", 1},
    {DType::float8_e5m2, "float8_e5m2", 1},
    {DType::float8_e5m2fnuz, "float8_e5m2fnuz", 1},
    {DType::float8_e8m0fnu, "float8_e8m0fnu", 1},
    {DType::float4_e2m1fn_x2, "float4_e2m1fn_x2", 1},
    {DType::qint8, "qint8", 1},
    {DType::quint8, "quint8", 1},
    {DType::qint32, "qint32", 4},
    {DType::quint4x2, "quint4x2", 1},
    {DType::quint2x4, "quint2x4", 1},
    {DType::bits1x8, "bits1x8", 1},
    {DType::bits2x4, "bits2x4", 1},
    {DType::bits4x2, "bits4x2", 1},
    {DType::bits8, "bits8", 1},
    {DType::bits16, "bits16", 2},
    {DType::uint1, "uint1", 1},
    {DType::uint2, "uint2", 1},
    {DType::uint3, "uint3", 1},
    {DType::uint4, "uint4", 1},
    {DType::uint5, "uint5", 1},
    {DType::uint6, "uint6", 1},
    {DType::uint7, "uint7", 1},
    {DType::int1, "int1", 1},
    {DType::int2, "int2", 1},
    {DType::int3, "int3", 1},
    {DType::int4, "int4", 1},
    {DType::int5, "int5", 1},
    {DType::int6, "int6", 1},
    {DType::int7, "int7", 1},
}};

constexpr bool in_order_of_the_enum() {
  for (std::size_t i = 0; i < kDTypes.size(); ++i) {
    if (static_cast<std::size_t>(kDTypes[i].dtype) != i) return false;
  }
  return true;
}
static_assert(in_order_of_the_enum());

constexpr std::array<std::pair<std::string_view, DType>, 11> kAliases = {{
    {"half", DType::float16},
    {"float", DType::float32},
    {"double", DType::float64},
    {"short", DType::int16},
    {"int", DType::int32},
    {"long", DType::int64},
    {"chalf", DType::complex32},
    {"cfloat", DType::complex64},
    {"cdouble", DType::complex128},
    {"byte", DType::uint8},
    {"char", DType::int8},
}};

}  // namespace

std::string_view dtype_name(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)].name; }

std::int64_t dtype_size(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)].size_bytes; }

std::optional<DType> find_dtype(std::string_view name) {
  constexpr std::string_view kPrefix = "torch.";
  if (name.starts_with(kPrefix)) name.remove_prefix(kPrefix.size());
  for (const Description& description : kDTypes) {
    if (description.name == name) return description.dtype;
  }
  for (const auto& [alias, dtype] : kAliases) {
    if (alias == name) return dtype;
  }
  return std::nullopt;
}

DType dtype_from_name(std::string_view name) {
  const std::optional<DType> dtype = find_dtype(name);
  if (!dtype)
    fail(ErrorCode::unsupported, "unknown dtype '{}', expected one of PyTorch such as 'float32'", printable(name));
  return *dtype;
}

}  // namespace tessera
