#pragma once

namespace tessera::pickle {

// Python's str.isprintable of one character: repr shows it as it is.
bool is_printable(char32_t code_point);

}  // namespace tessera::pickle
