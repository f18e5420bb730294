#include "format/python/base64.h"

#include <algorithm>
#include <cstdint>

namespace tessera {

namespace {

constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

}  // namespace

std::string base64_encode(ByteView bytes) {
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const std::size_t count = std::min<std::size_t>(3, bytes.size() - i);
    std::uint32_t bits = 0;
    for (std::size_t j = 0; j < 3; ++j) bits = (bits << 8) | (j < count ? bytes[i + j] : 0u);
    for (std::size_t j = 0; j < 4; ++j) text.push_back(j <= count ? kAlphabet[(bits >> (18 - 6 * j)) & 63] : '=');
  }
  return text;
}

std::optional<Bytes> base64_decode(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  Bytes bytes;
  bytes.reserve(text.size() / 4 * 3);
  for (std::size_t i = 0; i < text.size(); i += 4) {
    std::uint32_t bits = 0;
    std::size_t count = 3;
    for (std::size_t j = 0; j < 4; ++j) {
      const char c = text[i + j];
      std::size_t digit = kAlphabet.find(c);
      if (digit == std::string_view::npos) {
        if (c != '=' || i + 4 != text.size() || j < 2 || (j == 2 && text[i + 3] != '=')) return std::nullopt;
        digit = 0;
        count = std::min(count, j - 1);
      }
      bits = (bits << 6) | static_cast<std::uint32_t>(digit);
    }
    for (std::size_t j = 0; j < 3; ++j) {
      const auto byte = static_cast<std::uint8_t>(bits >> (16 - 8 * j));
      if (j < count) {
        bytes.push_back(byte);
      } else if (byte != 0) {
        return std::nullopt;
      }
    }
  }
  return bytes;
}

}  // namespace tessera
