#include "format/pickle/integer.h"

#include <algorithm>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/format/pickle_value.h"

namespace tessera::pickle {

namespace {

constexpr std::uint32_t kDecimalWord = 1'000'000'000;
constexpr std::size_t kDecimalWordDigits = 9;
// Bytes below those that are displayed. Without the lower ones, the magnitude of a negative int may be one too large.
// The displayed digits show that only if all bytes of the guard are 0.
constexpr std::size_t kGuardBytes = 32;

// The absolute value in words of 32 bits, lowest first.
std::vector<std::uint32_t> magnitude_of(ByteView two_complement, bool negative) {
  std::vector<std::uint32_t> words(two_complement.size() / 4 + 1, 0);
  std::uint32_t carry = negative ? 1 : 0;
  for (std::size_t i = 0; i < words.size() * 4; ++i) {
    const std::uint32_t sign_byte = negative ? 0xff : 0;
    std::uint32_t byte = i < two_complement.size() ? two_complement[i] : sign_byte;
    if (negative) {
      byte = (~byte & 0xff) + carry;
      carry = byte >> 8;
    }
    words[i / 4] |= (byte & 0xff) << (8 * (i % 4));
  }
  return words;
}

Bytes bytes_of(const std::vector<std::uint32_t>& magnitude, bool negative) {
  Bytes bytes;
  std::uint32_t carry = negative ? 1 : 0;
  for (std::size_t i = 0; i <= magnitude.size() * 4; ++i) {
    std::uint32_t byte = i / 4 < magnitude.size() ? (magnitude[i / 4] >> (8 * (i % 4))) & 0xff : 0;
    if (negative) {
      byte = (~byte & 0xff) + carry;
      carry = byte >> 8;
    }
    bytes.push_back(static_cast<std::uint8_t>(byte));
  }
  bytes.resize(shortest_integer(bytes).size());
  return bytes;
}

int digit_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return 99;
}

std::optional<std::vector<std::uint32_t>> hexadecimal_words(std::string_view digits) {
  std::vector<std::uint32_t> words(digits.size() / 8 + 1, 0);
  for (std::size_t i = 0; i < digits.size(); ++i) {
    const int digit = digit_value(digits[digits.size() - 1 - i]);
    if (digit >= 16) return std::nullopt;
    words[i / 8] |= static_cast<std::uint32_t>(digit) << (4 * (i % 8));
  }
  return words;
}

std::string hexadecimal_text(const std::vector<std::uint32_t>& magnitude, bool negative) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string digits;  // lowest first
  for (const std::uint32_t word : magnitude) {
    for (int shift = 0; shift < 32; shift += 4) digits.push_back(kDigits[(word >> shift) & 15]);
  }
  digits.resize(digits.find_last_not_of('0') + 1);
  digits += negative ? "x0-" : "x0";
  std::reverse(digits.begin(), digits.end());
  return digits;
}

std::uint32_t take_base(std::string_view& digits) {
  if (digits.size() < 2 || digits[0] != '0') return 10;
  const char letter = static_cast<char>(digits[1] | 0x20);
  const std::uint32_t base = letter == 'x' ? 16 : letter == 'o' ? 8 : letter == 'b' ? 2 : 10;
  if (base != 10) digits.remove_prefix(2);
  return base;
}

}  // namespace

ByteView shortest_integer(ByteView two_complement) {
  std::size_t size = two_complement.size();
  while (size > 0) {
    const bool negative_below = size > 1 && (two_complement[size - 2] & 0x80) != 0;
    const std::uint8_t repeats_sign = negative_below ? 0xff : 0;
    if (two_complement[size - 1] != repeats_sign) break;
    --size;
  }
  return two_complement.first(size);
}

std::int64_t integer_from_bytes(ByteView two_complement) {
  std::uint64_t bits = !two_complement.empty() && (two_complement.back() & 0x80) != 0 ? ~std::uint64_t{0} : 0;
  for (std::size_t i = two_complement.size(); i > 0; --i) bits = (bits << 8) | two_complement[i - 1];
  return static_cast<std::int64_t>(bits);
}

std::optional<Bytes> parse_integer(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\n\v\f\r";
  const std::size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return std::nullopt;
  text = text.substr(first, text.find_last_not_of(kBlanks) + 1 - first);
  const bool negative = text.front() == '-';
  if (negative || text.front() == '+') text.remove_prefix(1);
  const std::uint32_t base = take_base(text);
  const bool is_old_octal =
      base == 10 && text.starts_with('0') && text.find_first_not_of('0') != std::string_view::npos;
  if (is_old_octal) return std::nullopt;
  if (text.empty() || (text.size() > kMostDigits && base != 16)) return std::nullopt;
  if (base == 16) {
    const auto words = hexadecimal_words(text);
    return words ? std::optional(bytes_of(*words, negative)) : std::nullopt;
  }
  std::vector<std::uint32_t> words;
  while (!text.empty()) {
    std::uint64_t carry = 0;
    std::uint64_t scale = 1;
    for (const char c : text.substr(0, kDecimalWordDigits)) {
      const int digit = digit_value(c);
      if (digit >= static_cast<int>(base)) return std::nullopt;
      carry = carry * base + static_cast<std::uint64_t>(digit);
      scale *= base;
    }
    for (std::uint32_t& word : words) {
      carry += word * scale;
      word = static_cast<std::uint32_t>(carry);
      carry >>= 32;
    }
    if (carry != 0) words.push_back(static_cast<std::uint32_t>(carry));
    text.remove_prefix(std::min(text.size(), kDecimalWordDigits));
  }
  return bytes_of(words, negative);
}

std::string integer_to_decimal(NodeRef integer, std::size_t limit) {
  if (integer.is(Kind::integer)) return std::to_string(integer.integer());
  ByteView bytes = integer.big_integer();
  const bool negative = (bytes.back() & 0x80) != 0;
  // Decimal takes quadratic time. More than half a byte per digit is too many digits.
  const bool is_long = bytes.size() > kMostDigits / 2;
  if (is_long) bytes = bytes.last(std::min(bytes.size(), limit / 2 + kGuardBytes));
  std::vector<std::uint32_t> words = magnitude_of(bytes, negative);
  if (is_long) return hexadecimal_text(words, negative);
  const std::vector<std::uint32_t> magnitude = words;
  std::string digits;  // lowest first
  while (!words.empty()) {
    std::uint64_t remainder = 0;
    for (std::size_t i = words.size(); i > 0; --i) {
      remainder = (remainder << 32) | words[i - 1];
      words[i - 1] = static_cast<std::uint32_t>(remainder / kDecimalWord);
      remainder %= kDecimalWord;
    }
    while (!words.empty() && words.back() == 0) words.pop_back();
    for (std::size_t i = 0; i < kDecimalWordDigits; ++i, remainder /= 10)
      digits.push_back(static_cast<char>('0' + remainder % 10));
  }
  digits.resize(digits.find_last_not_of('0') + 1);
  if (digits.size() > kMostDigits) return hexadecimal_text(magnitude, negative);
  if (negative) digits.push_back('-');
  std::reverse(digits.begin(), digits.end());
  return digits;
}

}  // namespace tessera::pickle
