#pragma once
/// \file
/// Conversion between floating-point types.
///
/// Laws: the result is that of `tensor.to(dtype)` of PyTorch 2.14 on a CPU, bit for bit. It is rounded to nearest, ties
/// to even, and subnormals are kept. float64 is rounded to float32 before it is converted to a smaller type. Values
/// beyond the largest number become infinity in float16, bfloat16 and float8_e5m2, the largest number in float8_e4m3fn
/// (448; PyTorch up to 2.6 gave NaN), and NaN in the fnuz types, which have no infinity. The fnuz types have no
/// negative zero either: it becomes zero.
///
/// NaN stays NaN, with the bits of PyTorch's portable kernels (`ATEN_CPU_CAPABILITY=default`). PyTorch's AVX2 and
/// AVX-512 kernels write other NaN bits to float16 and bfloat16, and not the same bits for every element. Only NaNs
/// differ.
///
/// Source: c10/util/{BFloat16,Half,Float8_*}.h, aten/src/ATen/native/cpu/CopyKernel.cpp.

#include <cstdint>

#include "tessera/base/dtype.h"

namespace tessera {

/// Returns true for float64, float32, float16, bfloat16 and all float8 and float4 types, and false for complex types.
bool is_floating_point(DType dtype);

/// Returns whether `cast` supports the conversion: from any dtype to itself, and among float64, float32, float16,
/// bfloat16, float8_e4m3fn, float8_e5m2, float8_e4m3fnuz and float8_e5m2fnuz.
bool can_cast(DType from, DType to);

/// Converts `count` elements at `source` into `destination`. They need no alignment and must not overlap. Throws
/// `Error(unsupported)` unless `can_cast(from, to)`. Memory-bound between float32 and bfloat16.
void cast(DType from, const std::uint8_t* source, DType to, std::uint8_t* destination, std::int64_t count);

/// Returns how many of `count` elements are finite and beyond the largest number of `to`, so that `cast` makes them
/// infinity, the largest number or NaN. Requires `can_cast(from, to)`.
std::int64_t count_beyond_range(DType from, const std::uint8_t* source, DType to, std::int64_t count);

}  // namespace tessera
