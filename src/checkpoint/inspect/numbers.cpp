#include "checkpoint/inspect/numbers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "tessera/base/cast.h"
#include "tessera/base/error.h"

namespace tessera::checkpoint {
namespace {

template <typename T>
void widen(const std::uint8_t* elements, double* out, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, elements + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    out[i] = static_cast<double>(value);
  }
}

// Of a type that `cast` converts to float32 without loss.
void widen_small_floats(DType dtype, const std::uint8_t* elements, double* out, std::int64_t count) {
  constexpr std::int64_t kWidenBlock = 1024;
  std::array<float, kWidenBlock> block;
  for (std::int64_t done = 0; done < count; done += kWidenBlock) {
    const std::int64_t n = std::min(kWidenBlock, count - done);
    cast(dtype, elements + done * dtype_size(dtype), DType::float32, reinterpret_cast<std::uint8_t*>(block.data()), n);
    std::copy_n(block.data(), n, out + done);
  }
}

// The exponent alone, with a bias of 127. PyTorch: c10/util/Float8_e8m0fnu.h.
void widen_e8m0(const std::uint8_t* elements, double* out, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = elements[i] == 0xff ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, elements[i] - 127);
  }
}

// The low half of a byte is the first number.
void widen_e2m1_pairs(const std::uint8_t* elements, double* out, std::int64_t count) {
  static constexpr std::array<double, 16> kValues = {0.0,  0.5,  1.0,  1.5,  2.0,  3.0,  4.0,  6.0,
                                                     -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0};
  for (std::int64_t i = 0; i < count; ++i) {
    out[2 * i] = kValues[elements[i] & 15];
    out[2 * i + 1] = kValues[elements[i] >> 4];
  }
}

}  // namespace

NumberKind number_kind(DType dtype) {
  switch (dtype) {
    case DType::bool_:
    case DType::uint8:
    case DType::int8:
    case DType::int16:
    case DType::int32:
    case DType::int64:
    case DType::uint16:
    case DType::uint32:
    case DType::uint64:
      return NumberKind::integer;
    case DType::complex32:
    case DType::complex64:
    case DType::complex128:
    case DType::bcomplex32:
      return NumberKind::complex;
    case DType::float4_e2m1fn_x2:
      return NumberKind::pair;
    default:
      return is_floating_point(dtype) ? NumberKind::real : NumberKind::none;
  }
}

std::int64_t numbers_per_element(DType dtype) {
  switch (number_kind(dtype)) {
    case NumberKind::none:
      return 0;
    case NumberKind::complex:
    case NumberKind::pair:
      return 2;
    default:
      return 1;
  }
}

void widen_elements(DType dtype, const std::uint8_t* elements, double* out, std::int64_t count) {
  switch (dtype) {
    case DType::float64:
      return widen<double>(elements, out, count);
    case DType::float32:
      return widen<float>(elements, out, count);
    case DType::bool_:
      for (std::int64_t i = 0; i < count; ++i) out[i] = elements[i] != 0 ? 1 : 0;
      return;
    case DType::uint8:
      return widen<std::uint8_t>(elements, out, count);
    case DType::int8:
      return widen<std::int8_t>(elements, out, count);
    case DType::int16:
      return widen<std::int16_t>(elements, out, count);
    case DType::int32:
      return widen<std::int32_t>(elements, out, count);
    case DType::int64:
      return widen<std::int64_t>(elements, out, count);
    case DType::uint16:
      return widen<std::uint16_t>(elements, out, count);
    case DType::uint32:
      return widen<std::uint32_t>(elements, out, count);
    case DType::uint64:
      return widen<std::uint64_t>(elements, out, count);
    case DType::complex32:
      return widen_elements(DType::float16, elements, out, 2 * count);
    case DType::complex64:
      return widen_elements(DType::float32, elements, out, 2 * count);
    case DType::complex128:
      return widen_elements(DType::float64, elements, out, 2 * count);
    case DType::bcomplex32:
      return widen_elements(DType::bfloat16, elements, out, 2 * count);
    case DType::float8_e8m0fnu:
      return widen_e8m0(elements, out, count);
    case DType::float4_e2m1fn_x2:
      return widen_e2m1_pairs(elements, out, count);
    default:
      break;
  }
  if (!can_cast(dtype, DType::float32)) fail(ErrorCode::internal, "widen {}: not a number", dtype_name(dtype));
  widen_small_floats(dtype, elements, out, count);
}

}  // namespace tessera::checkpoint
