#include <fmt/ranges.h>

#include "tessera/base/error.h"
#include "tessera/format/npy.h"

namespace tessera::npy {

std::optional<std::string_view> type_string(DType dtype) {
  switch (dtype) {
    case DType::bool_:
      return "|b1";
    case DType::int8:
      return "|i1";
    case DType::uint8:
      return "|u1";
    case DType::int16:
      return "<i2";
    case DType::uint16:
      return "<u2";
    case DType::int32:
      return "<i4";
    case DType::uint32:
      return "<u4";
    case DType::int64:
      return "<i8";
    case DType::uint64:
      return "<u8";
    case DType::float16:
      return "<f2";
    case DType::float32:
      return "<f4";
    case DType::float64:
      return "<f8";
    case DType::complex64:
      return "<c8";
    case DType::complex128:
      return "<c16";
    default:
      return std::nullopt;
  }
}

Bytes header(DType dtype, const std::vector<std::int64_t>& shape) {
  constexpr std::size_t kAlignment = 64, kPrefixBytes = 10, kMaxTextBytes = 65535;
  const auto type = type_string(dtype);
  if (!type)
    fail(ErrorCode::unsupported, "write .npy: NumPy has no dtype {}, expected one that NumPy has, such as float32",
         dtype_name(dtype));
  std::string text = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}", *type,
                                 fmt::join(shape, ", "), shape.size() == 1 ? "," : "");
  text.append(kAlignment - 1 - (kPrefixBytes + text.size()) % kAlignment, ' ');
  text += '\n';
  if (text.size() > kMaxTextBytes) {
    fail(ErrorCode::unsupported, "write .npy: a header of {} bytes for {} dimensions, expected at most {}", text.size(),
         shape.size(), kMaxTextBytes);
  }
  Bytes out;
  append(out, std::string_view("\x93NUMPY\x01\x00", 8));
  append_little_endian(out, static_cast<std::uint16_t>(text.size()));
  append(out, text);
  return out;
}

}  // namespace tessera::npy
