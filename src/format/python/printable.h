#pragma once

namespace tessera::pickle {

// Python's str.isprintable for one character: whether repr leaves it as it is.
bool is_printable(char32_t code_point);

}  // namespace tessera::pickle
