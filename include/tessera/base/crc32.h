#pragma once
/// \file
/// CRC-32 of zip, gzip and zlib (reflected polynomial 0xEDB88320, initial value 0).
///
/// Laws: `crc32(a ++ b) == crc32(b, crc32(a)) == crc32_combine(crc32(a), crc32(b), |b|)`.

#include <cstdint>

#include "tessera/base/bytes.h"

namespace tessera {

/// Returns the CRC-32 of `bytes`, continuing from `initial`, the CRC-32 of the bytes before them.
std::uint32_t crc32(ByteView bytes, std::uint32_t initial = 0);

/// Returns the CRC-32 of a ++ b, given the CRC-32 of each and the length of b.
std::uint32_t crc32_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t length_b_bytes);

}  // namespace tessera
