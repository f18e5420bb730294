#pragma once
// Python's ints of any size: two's complement, little-endian.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "tessera/base/bytes.h"

namespace tessera::pickle {

// Python's own limit for the digits of an int in text, if they are not hexadecimal.
inline constexpr std::size_t kMostDigits = 4300;

// Removes the highest bytes that only repeat the sign; 0 has no bytes.
ByteView shortest_integer(ByteView two_complement);

// Requires at most 8 bytes.
std::int64_t integer_from_bytes(ByteView two_complement);

// Parses an int in text as Python's int(text, 0) does (decimal, 0x, 0o, 0b, a sign, surrounding blanks) and returns its
// shortest bytes. Returns nothing if it is not an int or has more than `kMostDigits` digits.
std::optional<Bytes> parse_integer(std::string_view text);

}  // namespace tessera::pickle
