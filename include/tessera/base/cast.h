#pragma once
/// \file
/// Conversion of numbers between floating-point types.
///
/// Laws: as `tensor.to(dtype)` of PyTorch 2.14 on a CPU, bit for bit: rounding to nearest, ties to even; subnormals
/// kept; float64 to a type below float32 is rounded to float32 first. Beyond the largest number, float16, bfloat16 and
/// float8_e5m2 give infinity, float8_e4m3fn its largest number (448, PyTorch up to 2.6 gave NaN), and the fnuz types
/// NaN, which is all that they have; a negative zero becomes zero there.
///
/// NaN stays NaN. Its bits are those of PyTorch's portable kernels (`ATEN_CPU_CAPABILITY=default`); PyTorch's AVX2 and
/// AVX-512 kernels write other bits of a NaN, and only of a NaN, to float16 and bfloat16, and not the same for every
/// element. Source: c10/util/{BFloat16,Half,Float8_*}.h, aten/src/ATen/native/cpu/CopyKernel.cpp.

#include <cstdint>

#include "tessera/base/dtype.h"

namespace tessera {

/// float64, float32, float16, bfloat16 and all float8 and float4 types. Complex numbers are not.
bool is_floating_point(DType dtype);

/// Whether `cast` can. From any dtype to itself, and among float64, float32, float16, bfloat16, float8_e4m3fn,
/// float8_e5m2, float8_e4m3fnuz and float8_e5m2fnuz.
bool can_cast(DType from, DType to);

/// Converts `count` elements at `source` into `destination`; neither needs to be aligned, and they must not overlap.
/// Throws `Error(unsupported)` where `can_cast` says no. Memory-bound for float32 to bfloat16 and back.
void cast(DType from, const std::uint8_t* source, DType to, std::uint8_t* destination, std::int64_t count);

}  // namespace tessera
