#pragma once
// RFC 4648, section 4, padded.

#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/bytes.h"

namespace tessera {

std::string base64_encode(ByteView bytes);

// Nothing if `text` is not what base64_encode makes of some bytes.
std::optional<Bytes> base64_decode(std::string_view text);

}  // namespace tessera
