#pragma once
// Returns the length in bytes (1 to 4) of the UTF-8 sequence at the beginning of `text`, or 0 if there is no valid one.
// Surrogates, overlong forms and code points above U+10FFFF are invalid.

#include <cstddef>
#include <string_view>

namespace tessera {

inline std::size_t utf8_sequence_length(std::string_view text) {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const auto continues = [&](std::size_t i) { return i < text.size() && (at(i) & 0xc0) == 0x80; };
  if (text.empty()) return 0;
  const unsigned char first = at(0);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return continues(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    if (!continues(1) || !continues(2)) return 0;
    if (first == 0xe0 && at(1) < 0xa0) return 0;
    if (first == 0xed && at(1) >= 0xa0) return 0;
    return 3;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    if (!continues(1) || !continues(2) || !continues(3)) return 0;
    if (first == 0xf0 && at(1) < 0x90) return 0;
    if (first == 0xf4 && at(1) >= 0x90) return 0;
    return 4;
  }
  return 0;
}

}  // namespace tessera
