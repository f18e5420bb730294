#include "tessera/base/crc32.h"

#include <isa-l/crc.h>
#include <zlib.h>

namespace tessera {

std::uint32_t crc32(ByteView bytes, std::uint32_t initial) {
  return crc32_gzip_refl(initial, bytes.data(), bytes.size());
}

std::uint32_t crc32_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t length_b_bytes) {
  // zlib declares the parameter as a signed offset, which is large enough for the length of any file.
  return static_cast<std::uint32_t>(::crc32_combine64(crc_a, crc_b, static_cast<z_off64_t>(length_b_bytes)));
}

}  // namespace tessera
