#pragma once
// Base64 with padding (RFC 4648, section 4).

#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/bytes.h"

namespace tessera {

std::string base64_encode(ByteView bytes);

// Returns nothing if `text` is not the output of base64_encode for some bytes.
std::optional<Bytes> base64_decode(std::string_view text);

}  // namespace tessera
