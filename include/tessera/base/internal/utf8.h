#pragma once
// UTF-8 sequences, and those that must not reach a terminal.

#include <cstddef>
#include <string_view>

namespace tessera {

// Returns the length in bytes (1 to 4) of the UTF-8 sequence at the beginning of `text`, or 0 if there is no valid one.
// Surrogates, overlong forms and code points above U+10FFFF are invalid.
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

// Returns the length of the character at the beginning of `text` if it controls a terminal or the order of text: C0 and
// C1 controls, DEL, line and paragraph separators, bidirectional marks, embeddings, overrides and isolates. Else 0.
inline std::size_t control_sequence_length(std::string_view text) {
  const std::size_t length = utf8_sequence_length(text);
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  if (length == 1) return at(0) < 0x20 || at(0) == 0x7f ? 1 : 0;
  if (length == 2) return (at(0) == 0xc2 && at(1) < 0xa0) || (at(0) == 0xd8 && at(1) == 0x9c) ? 2 : 0;  // U+061C
  if (length != 3 || at(0) != 0xe2) return 0;
  if (at(1) == 0x80) return at(2) == 0x8e || at(2) == 0x8f || (at(2) >= 0xa8 && at(2) <= 0xae) ? 3 : 0;
  return at(1) == 0x81 && at(2) >= 0xa6 && at(2) <= 0xa9 ? 3 : 0;
}

}  // namespace tessera
