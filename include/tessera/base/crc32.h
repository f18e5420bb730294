#pragma once
/// \file
/// CRC-32 as zip, gzip and zlib have it (reflected polynomial 0xEDB88320, initial value 0).
///
/// Laws: `crc32(a ++ b) == crc32(b, crc32(a)) == crc32_combine(crc32(a), crc32(b), |b|)`.

#include <cstdint>

#include "tessera/base/bytes.h"

namespace tessera {

/// The CRC-32 of `bytes` behind bytes whose CRC-32 is `initial`.
std::uint32_t crc32(ByteView bytes, std::uint32_t initial = 0);

/// The CRC-32 of a ++ b from those of a and of b and the length of b.
std::uint32_t crc32_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t length_b_bytes);

}  // namespace tessera
