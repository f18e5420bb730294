#pragma once
/// \file
/// Element types: every `torch.dtype` of PyTorch 1.13 to 2.14, under PyTorch's name without `torch.`.
///
/// Law: `dtype_from_name(dtype_name(d)) == d` for every d. Types that pack several elements into a byte
/// (`float4_e2m1fn_x2`, `quint4x2`, `bits1x8`, ...) have PyTorch's `itemsize`, the size of the packed unit. Source:
/// c10/core/ScalarType.h, torch/storage.py.

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace tessera {

/// An element type.
enum class DType : std::uint8_t {
  float32,
  float64,
  float16,
  bfloat16,
  complex32,
  complex64,
  complex128,
  bcomplex32,
  uint8,
  int8,
  int16,
  int32,
  int64,
  bool_,
  uint16,
  uint32,
  uint64,
  float8_e4m3fn,
  float8_e4m3fnuz,
  float8_e5m2,
  float8_e5m2fnuz,
  float8_e8m0fnu,
  float4_e2m1fn_x2,
  qint8,
  quint8,
  qint32,
  quint4x2,
  quint2x4,
  bits1x8,
  bits2x4,
  bits4x2,
  bits8,
  bits16,
  uint1,
  uint2,
  uint3,
  uint4,
  uint5,
  uint6,
  uint7,
  int1,
  int2,
  int3,
  int4,
  int5,
  int6,
  int7,
};

inline constexpr std::size_t kDTypeCount = static_cast<std::size_t>(DType::int7) + 1;

/// Returns PyTorch's name without `torch.`: "float32", "bool".
std::string_view dtype_name(DType dtype);

/// Returns the bytes per element (`torch.dtype.itemsize`), at least 1.
std::int64_t dtype_size(DType dtype);

/// Returns the dtype called `name`, with or without `torch.`, or nothing if PyTorch has no such dtype. Accepts
/// PyTorch's aliases ("half", "float", "double", "long", ...).
std::optional<DType> find_dtype(std::string_view name);

/// Same as `find_dtype`, but throws `Error(unsupported)` naming `name` if there is no such dtype.
DType dtype_from_name(std::string_view name);

}  // namespace tessera
