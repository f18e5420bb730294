#pragma once
/// \file
/// Byte views and explicit little-endian loads and stores. A `ByteView` does not own its bytes.

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

using ByteView = std::span<const std::uint8_t>;
using MutableByteView = std::span<std::uint8_t>;
using Bytes = std::vector<std::uint8_t>;

/// Views text as bytes, and bytes as text. Nothing is copied.
inline ByteView as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}
inline std::string_view as_text(ByteView bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

/// Returns the little-endian number in the first sizeof(T) bytes at `p`, which must be readable.
template <std::unsigned_integral T>
T load_little_endian(const std::uint8_t* p) {
  T value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) value = static_cast<T>(value | (static_cast<T>(p[i]) << (8 * i)));
  return value;
}

/// Appends `value` as sizeof(T) little-endian bytes.
template <std::unsigned_integral T>
void append_little_endian(Bytes& out, T value) {
  std::array<std::uint8_t, sizeof(T)> bytes;
  for (std::size_t i = 0; i < sizeof(T); ++i) bytes[i] = static_cast<std::uint8_t>(value >> (8 * i));
  out.insert(out.end(), bytes.begin(), bytes.end());
}

/// Appends bytes or text.
inline void append(Bytes& out, ByteView bytes) { out.insert(out.end(), bytes.begin(), bytes.end()); }
inline void append(Bytes& out, std::string_view text) { append(out, as_bytes(text)); }

/// Formats a size for people: "3.2 MiB", "17 B".
std::string format_bytes(std::uint64_t bytes);

}  // namespace tessera
