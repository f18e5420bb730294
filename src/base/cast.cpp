#include "tessera/base/cast.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera {
namespace {

// All conversions go through float32: every type except float64 converts to it without loss, and PyTorch rounds float64
// to it too. A block of this many elements stays in the L1 cache.
constexpr std::int64_t kBlock = 2048;
using Floats = std::array<float, kBlock>;

constexpr std::uint32_t kSign = 0x80000000u, kInfinity = 0x7F800000u;

template <typename T>
T load(const std::uint8_t* p, std::int64_t i) {
  T value;
  std::memcpy(&value, p + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return value;
}

template <typename T>
void store(std::uint8_t* p, std::int64_t i, T value) {
  std::memcpy(p + i * static_cast<std::int64_t>(sizeof(T)), &value, sizeof(T));
}

// The result for values beyond the largest number.
enum class Overflow { to_infinity, to_largest, to_nan };

// A type of at most 16 bits: a sign, exponent bits, mantissa bits.
struct Format {
  int exponent_bits, mantissa_bits, bias;
  std::uint32_t largest;  // bits of the largest number; infinity, if there is one, and NaN are above it
  Overflow overflow;
  std::uint32_t nan;  // the result for a NaN, without the sign
  bool nan_keeps_sign;
  bool has_negative_zero;
  std::uint32_t nan_as_float;  // the float for a NaN with all bits set, in types where all NaN are equal
};

constexpr Format kFloat16 = {5, 10, 15, 0x7BFF, Overflow::to_infinity, 0x7E00, true, true, 0};
constexpr Format kE5M2 = {5, 2, 15, 0x7B, Overflow::to_infinity, 0x7F, true, true, 0};
constexpr Format kE4M3FN = {4, 3, 7, 0x7E, Overflow::to_largest, 0x7F, true, true, 0x7FF00000u};
constexpr Format kE4M3FNUZ = {4, 3, 8, 0x7F, Overflow::to_nan, 0x80, false, false, 0x7F800001u};
constexpr Format kE5M2FNUZ = {5, 2, 16, 0x7F, Overflow::to_nan, 0x80, false, false, 0x7F800001u};

// Returns the bits of 2^exponent as a float.
constexpr std::uint32_t power_of_two(int exponent) { return static_cast<std::uint32_t>(exponent + 127) << 23; }

// Without branches, so that the compiler can vectorize loops over it.
template <Format F>
constexpr std::uint32_t encode(float value) {
  constexpr int kDropped = 23 - F.mantissa_bits;
  constexpr std::uint32_t kSmallestNormal = power_of_two(1 - F.bias);
  constexpr int kSignShift = 31 - F.exponent_bits - F.mantissa_bits;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & ~kSign;
  const std::uint32_t sign = (bits & kSign) >> kSignShift;

  // Normal: change the bias and add half of the dropped part, less one if the lowest kept bit is even.
  const std::uint32_t odd = (magnitude >> kDropped) & 1;
  const std::uint32_t rebias = static_cast<std::uint32_t>(127 - F.bias) << 23;
  const std::uint32_t normal = (magnitude - rebias + (1u << (kDropped - 1)) - 1 + odd) >> kDropped;

  // Subnormal: add a number whose last mantissa bit has the weight of the type's smallest number, so that the addition
  // rounds there.
  constexpr std::uint32_t kMagic = power_of_two(1 - F.bias - F.mantissa_bits + 23);
  const float small = std::bit_cast<float>(magnitude < kSmallestNormal ? magnitude : 0) + std::bit_cast<float>(kMagic);
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(small) - kMagic;

  std::uint32_t result = magnitude < kSmallestNormal ? subnormal : normal;
  constexpr std::uint32_t kBeyond = F.overflow == Overflow::to_largest    ? F.largest
                                    : F.overflow == Overflow::to_infinity ? F.largest + 1
                                                                          : F.nan;
  const bool is_nan = magnitude > kInfinity;
  const bool is_beyond = magnitude >= kSmallestNormal && (normal > F.largest || magnitude >= kInfinity);
  result = is_beyond ? kBeyond : result;
  result = is_nan ? F.nan : result;
  const bool drops_sign = (is_nan && !F.nan_keeps_sign) || (is_beyond && F.overflow == Overflow::to_nan) ||
                          (result == 0 && !F.has_negative_zero);
  return drops_sign ? result : (result | sign);
}

// Returns the bits of the float, so that a signaling NaN is never in a float register while the compiler evaluates it.
template <Format F>
constexpr std::uint32_t decode(std::uint32_t bits) {
  constexpr int kDropped = 23 - F.mantissa_bits;
  constexpr int kSignBit = F.exponent_bits + F.mantissa_bits;
  const std::uint32_t sign = (bits >> kSignBit) << 31;
  const std::uint32_t magnitude = bits & ((1u << kSignBit) - 1);
  // Below the normal numbers the exponent is one too high and there is no leading one: subtract both.
  constexpr std::uint32_t kSmallestNormal = power_of_two(1 - F.bias);
  const std::uint32_t rebias = static_cast<std::uint32_t>(127 - F.bias) << 23;
  const std::uint32_t normal = (magnitude << kDropped) + rebias;
  const float small =
      std::bit_cast<float>(kSmallestNormal | (magnitude << kDropped)) - std::bit_cast<float>(kSmallestNormal);
  std::uint32_t result = magnitude < (1u << F.mantissa_bits) ? std::bit_cast<std::uint32_t>(small) : normal;
  if constexpr (F.overflow == Overflow::to_infinity) {
    constexpr std::uint32_t kQuiet = 0x00400000u;
    const bool is_nan = magnitude > F.largest + 1;
    result = magnitude > F.largest ? (kInfinity | (magnitude << kDropped) | (is_nan ? kQuiet : 0)) : result;
  } else if constexpr (F.has_negative_zero) {
    result = magnitude > F.largest ? F.nan_as_float : result;
  } else {
    return bits == F.nan ? F.nan_as_float : (result | sign);
  }
  return result | sign;
}

constexpr std::uint16_t encode_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return static_cast<std::uint16_t>((bits & ~kSign) > kInfinity ? 0x7FC0 : rounded);
}

// Decodes all 256 values of an 8-bit type.
template <Format F>
constexpr std::array<std::uint32_t, 256> decode_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t bits = 0; bits < 256; ++bits) table[bits] = decode<F>(bits);
  return table;
}

template <Format F>
void decode_8_bits(const std::uint8_t* source, float* out, std::int64_t count) {
  static constexpr std::array<std::uint32_t, 256> kTable = decode_table<F>();
  for (std::int64_t i = 0; i < count; ++i) out[i] = std::bit_cast<float>(kTable[source[i]]);
}

template <Format F, typename Bits>
void encode_all(const float* values, std::uint8_t* destination, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) store(destination, i, static_cast<Bits>(encode<F>(values[i])));
}

// Converts to float32. `dtype` must be `is_convertible`.
void to_floats(DType dtype, const std::uint8_t* source, float* out, std::int64_t count) {
  switch (dtype) {
    case DType::float64:
      for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(load<double>(source, i));
      return;
    case DType::float16:
      for (std::int64_t i = 0; i < count; ++i)
        out[i] = std::bit_cast<float>(decode<kFloat16>(load<std::uint16_t>(source, i)));
      return;
    case DType::bfloat16:
      for (std::int64_t i = 0; i < count; ++i) {
        out[i] = std::bit_cast<float>(static_cast<std::uint32_t>(load<std::uint16_t>(source, i)) << 16);
      }
      return;
    case DType::float8_e4m3fn:
      return decode_8_bits<kE4M3FN>(source, out, count);
    case DType::float8_e5m2:
      return decode_8_bits<kE5M2>(source, out, count);
    case DType::float8_e4m3fnuz:
      return decode_8_bits<kE4M3FNUZ>(source, out, count);
    case DType::float8_e5m2fnuz:
      return decode_8_bits<kE5M2FNUZ>(source, out, count);
    default:
      std::memcpy(out, source, static_cast<std::size_t>(count) * sizeof(float));
  }
}

void from_floats(const float* values, DType dtype, std::uint8_t* destination, std::int64_t count) {
  switch (dtype) {
    case DType::float64:
      for (std::int64_t i = 0; i < count; ++i) store(destination, i, static_cast<double>(values[i]));
      return;
    case DType::float16:
      return encode_all<kFloat16, std::uint16_t>(values, destination, count);
    case DType::bfloat16:
      for (std::int64_t i = 0; i < count; ++i) store(destination, i, encode_bfloat16(values[i]));
      return;
    case DType::float8_e4m3fn:
      return encode_all<kE4M3FN, std::uint8_t>(values, destination, count);
    case DType::float8_e5m2:
      return encode_all<kE5M2, std::uint8_t>(values, destination, count);
    case DType::float8_e4m3fnuz:
      return encode_all<kE4M3FNUZ, std::uint8_t>(values, destination, count);
    case DType::float8_e5m2fnuz:
      return encode_all<kE5M2FNUZ, std::uint8_t>(values, destination, count);
    default:
      std::memcpy(destination, values, static_cast<std::size_t>(count) * sizeof(float));
  }
}

bool is_convertible(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::float32:
    case DType::float16:
    case DType::bfloat16:
    case DType::float8_e4m3fn:
    case DType::float8_e5m2:
    case DType::float8_e4m3fnuz:
    case DType::float8_e5m2fnuz:
      return true;
    default:
      return false;
  }
}

// Returns the least magnitude that is rounded beyond the largest number of `dtype`.
float least_beyond(DType dtype) {
  switch (dtype) {
    case DType::float16:
      return 65520.0f;
    case DType::bfloat16:
      return std::bit_cast<float>(0x7F7F8000u);
    case DType::float8_e4m3fn:
      return std::bit_cast<float>(std::bit_cast<std::uint32_t>(464.0f) + 1);  // 464 is rounded to 448, which is even
    case DType::float8_e4m3fnuz:
      return 248.0f;
    case DType::float8_e5m2:
    case DType::float8_e5m2fnuz:
      return 61440.0f;
    default:
      return std::bit_cast<float>(kInfinity);
  }
}

}  // namespace

std::int64_t count_beyond_range(DType from, const std::uint8_t* source, DType to, std::int64_t count) {
  if (from == to || to == DType::float64) return 0;
  const float limit = least_beyond(to);
  std::int64_t found = 0;
  if (from == DType::float64) {
    for (std::int64_t i = 0; i < count; ++i) {
      const double value = load<double>(source, i);
      found += std::isfinite(value) && std::fabs(static_cast<float>(value)) >= limit ? 1 : 0;
    }
    return found;
  }
  alignas(64) Floats block;
  for (std::int64_t done = 0; done < count; done += kBlock) {
    const std::int64_t n = std::min(kBlock, count - done);
    to_floats(from, source + done * dtype_size(from), block.data(), n);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(block[static_cast<std::size_t>(i)]) & ~kSign;
      found += magnitude < kInfinity && std::bit_cast<float>(magnitude) >= limit ? 1 : 0;
    }
  }
  return found;
}

bool is_floating_point(DType dtype) {
  return is_convertible(dtype) || dtype == DType::float8_e8m0fnu || dtype == DType::float4_e2m1fn_x2;
}

bool can_cast(DType from, DType to) { return from == to || (is_convertible(from) && is_convertible(to)); }

void cast(DType from, const std::uint8_t* source, DType to, std::uint8_t* destination, std::int64_t count) {
  if (!can_cast(from, to)) {
    fail(ErrorCode::unsupported,
         "cast {} to {}: unsupported, expected two of float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, "
         "float8_e4m3fnuz, float8_e5m2fnuz",
         dtype_name(from), dtype_name(to));
  }
  if (from == to) {
    if (count > 0) std::memcpy(destination, source, static_cast<std::size_t>(count * dtype_size(from)));
    return;
  }
  alignas(64) Floats block;
  for (std::int64_t done = 0; done < count; done += kBlock) {
    const std::int64_t n = std::min(kBlock, count - done);
    to_floats(from, source + done * dtype_size(from), block.data(), n);
    from_floats(block.data(), to, destination + done * dtype_size(to), n);
  }
}

}  // namespace tessera
