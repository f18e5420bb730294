// The text of single elements.

#include <fmt/format.h>

#include <cstring>

#include "tessera/base/cast.h"
#include "tessera/checkpoint/diff.h"

namespace tessera::checkpoint {
namespace {

template <typename T>
T element_as(const std::uint8_t* element) {
  T value;
  std::memcpy(&value, element, sizeof value);
  return value;
}

std::string real_to_string(DType dtype, const std::uint8_t* element) {
  double value = 0;
  cast(dtype, element, DType::float64, reinterpret_cast<std::uint8_t*>(&value), 1);
  if (dtype == DType::float32) return fmt::format("{}", static_cast<float>(value));
  return fmt::format("{}", value);
}

std::string complex_to_string(DType real, const std::uint8_t* element) {
  const std::string imaginary = real_to_string(real, element + dtype_size(real));
  return fmt::format("({}{}{}j)", real_to_string(real, element), imaginary.starts_with('-') ? "" : "+", imaginary);
}

}  // namespace

std::string element_to_string(DType dtype, const std::uint8_t* element) {
  switch (dtype) {
    case DType::bool_:
      return element[0] != 0 ? "True" : "False";
    case DType::uint8:
      return fmt::format("{}", element_as<std::uint8_t>(element));
    case DType::int8:
      return fmt::format("{}", element_as<std::int8_t>(element));
    case DType::int16:
      return fmt::format("{}", element_as<std::int16_t>(element));
    case DType::int32:
      return fmt::format("{}", element_as<std::int32_t>(element));
    case DType::int64:
      return fmt::format("{}", element_as<std::int64_t>(element));
    case DType::uint16:
      return fmt::format("{}", element_as<std::uint16_t>(element));
    case DType::uint32:
      return fmt::format("{}", element_as<std::uint32_t>(element));
    case DType::uint64:
      return fmt::format("{}", element_as<std::uint64_t>(element));
    case DType::complex32:
      return complex_to_string(DType::float16, element);
    case DType::complex64:
      return complex_to_string(DType::float32, element);
    case DType::complex128:
      return complex_to_string(DType::float64, element);
    case DType::bcomplex32:
      return complex_to_string(DType::bfloat16, element);
    default:
      break;
  }
  if (is_floating_point(dtype) && can_cast(dtype, DType::float64)) return real_to_string(dtype, element);
  std::string text = "0x";
  for (std::int64_t i = dtype_size(dtype); i-- > 0;) text += fmt::format("{:02x}", element[i]);
  return text;
}

}  // namespace tessera::checkpoint
