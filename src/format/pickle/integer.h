#pragma once
// Python's ints of any size: two's complement, little-endian.

#include <cstdint>
#include <optional>
#include <string_view>

#include "tessera/base/bytes.h"

namespace tessera::pickle {

// Without the highest bytes that only repeat the sign; 0 is no bytes.
ByteView shortest_integer(ByteView two_complement);

// Of at most 8 bytes.
std::int64_t integer_from_bytes(ByteView two_complement);

// The shortest bytes of an int written in text as Python's int(text, 0) reads it (decimal, 0x, 0o, 0b, a sign, blanks
// around); nothing if it is none or has more than 4300 digits, Python's own limit.
std::optional<Bytes> parse_integer(std::string_view text);

}  // namespace tessera::pickle
