#pragma once
/// \file
/// The header of NumPy's `.npy` files, version 1.0. The elements follow it, row-major and little-endian.
/// Source: numpy/lib/format.py.

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/dtype.h"

namespace tessera::npy {

/// Returns NumPy's type string, such as "<f4" for float32, or nothing if NumPy has no such dtype (bfloat16, float8,
/// ...).
std::optional<std::string_view> type_string(DType dtype);

/// Returns the bytes before the elements, a multiple of 64. Throws `Error(unsupported)` for a dtype without a type
/// string and for a shape of so many dimensions that the header has over 65535 bytes.
Bytes header(DType dtype, const std::vector<std::int64_t>& shape);

}  // namespace tessera::npy
