#include "tessera/format/internal/pickle_text.h"

#include <locale.h>  // NOLINT(modernize-deprecated-headers): POSIX
#include <stdlib.h>  // NOLINT(modernize-deprecated-headers): strtod_l

#include <charconv>
#include <cstdint>
#include <cstring>

#include "tessera/base/internal/utf8.h"

namespace tessera::pickle {

namespace {

std::size_t leading_ascii(std::string_view text) {
  constexpr std::uint64_t kHighBits = 0x8080'8080'8080'8080;
  std::size_t size = 0;
  for (std::uint64_t word; size + 8 <= text.size(); size += 8) {
    std::memcpy(&word, text.data() + size, 8);
    if (word & kHighBits) break;
  }
  while (size < text.size() && static_cast<unsigned char>(text[size]) < 0x80) ++size;
  return size;
}

template <typename SequenceLength>
bool consists_of(std::string_view text, SequenceLength length_of) {
  for (;;) {
    text.remove_prefix(leading_ascii(text));
    if (text.empty()) return true;
    const std::size_t length = length_of(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
}

// Parses the first `digits` characters of `text` as a hexadecimal number.
std::optional<char32_t> hexadecimal(std::string_view text, std::size_t digits) {
  if (text.size() < digits) return std::nullopt;
  char32_t value = 0;
  for (const char c : text.substr(0, digits)) {
    value <<= 4;
    if (c >= '0' && c <= '9') {
      value += static_cast<char32_t>(c - '0');
    } else if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f') {
      value += static_cast<char32_t>((c | 0x20) - 'a' + 10);
    } else {
      return std::nullopt;
    }
  }
  return value;
}

// The byte of \n and the like, or 0.
char simple_escape(char letter) {
  constexpr std::string_view kLetters = "\\'\"abfnrtv";
  constexpr std::string_view kBytes = "\\'\"\a\b\f\n\r\t\v";
  const std::size_t index = kLetters.find(letter);
  return index == std::string_view::npos ? '\0' : kBytes[index];
}

bool is_octal(char c) { return c >= '0' && c <= '7'; }

}  // namespace

std::size_t python_utf8_sequence_length(std::string_view text) {
  const std::size_t length = utf8_sequence_length(text);
  if (length != 0 || text.size() < 3) return length;
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  return at(0) == 0xed && at(1) >= 0xa0 && at(1) <= 0xbf && (at(2) & 0xc0) == 0x80 ? 3 : 0;
}

bool is_python_utf8(std::string_view text) { return consists_of(text, python_utf8_sequence_length); }
bool is_utf8(std::string_view text) { return consists_of(text, utf8_sequence_length); }
bool is_surrogate(char32_t code_point) { return code_point >= 0xd800 && code_point <= 0xdfff; }

void append_utf8(std::string& out, char32_t c) {
  const auto put = [&](char32_t byte) { out.push_back(static_cast<char>(static_cast<unsigned char>(byte))); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xc0 | (c >> 6));
    put(0x80 | (c & 0x3f));
  } else if (c < 0x10000) {
    put(0xe0 | (c >> 12));
    put(0x80 | ((c >> 6) & 0x3f));
    put(0x80 | (c & 0x3f));
  } else {
    put(0xf0 | (c >> 18));
    put(0x80 | ((c >> 12) & 0x3f));
    put(0x80 | ((c >> 6) & 0x3f));
    put(0x80 | (c & 0x3f));
  }
}

char32_t take_code_point(std::string_view& text) {
  const std::size_t length = python_utf8_sequence_length(text);
  if (length == 0) {
    const auto byte = static_cast<unsigned char>(text[0]);
    text.remove_prefix(1);
    return char32_t{0xdc00} + byte;
  }
  const auto at = [&](std::size_t i) { return static_cast<char32_t>(static_cast<unsigned char>(text[i])); };
  constexpr char32_t kFirstBits[] = {0, 0x7f, 0x1f, 0x0f, 0x07};
  char32_t value = at(0) & kFirstBits[length];
  for (std::size_t i = 1; i < length; ++i) value = (value << 6) | (at(i) & 0x3f);
  text.remove_prefix(length);
  return value;
}

std::optional<std::string> parse_quoted_bytes(std::string_view literal) {
  const char quote = literal.size() < 2 ? '\0' : literal.front();
  if ((quote != '\'' && quote != '"') || literal.back() != quote) return std::nullopt;
  literal = literal.substr(1, literal.size() - 2);
  std::string bytes;
  while (!literal.empty()) {
    const char c = literal.front();
    literal.remove_prefix(1);
    if (c != '\\') {
      bytes.push_back(c);
      continue;
    }
    if (literal.empty()) return std::nullopt;
    const char letter = literal.front();
    if (is_octal(letter)) {
      int value = 0;
      for (int digits = 0; digits < 3 && !literal.empty() && is_octal(literal.front()); ++digits) {
        value = value * 8 + (literal.front() - '0');
        literal.remove_prefix(1);
      }
      bytes.push_back(static_cast<char>(static_cast<unsigned char>(value)));
      continue;
    }
    literal.remove_prefix(1);
    if (letter == 'x') {
      const auto value = hexadecimal(literal, 2);
      if (!value) return std::nullopt;
      bytes.push_back(static_cast<char>(static_cast<unsigned char>(*value)));
      literal.remove_prefix(2);
    } else if (const char byte = simple_escape(letter)) {
      bytes.push_back(byte);
    } else if (letter !=
               '\n') {  // an escape that Python doesn't know is no escape; a backslash at a line's end joins lines
      bytes.push_back('\\');
      bytes.push_back(letter);
    }
  }
  return bytes;
}

std::optional<double> parse_float(std::string_view text) {
  if (text.starts_with('+') && !text.starts_with("+-")) text.remove_prefix(1);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (end != text.data() + text.size()) return std::nullopt;
  if (error == std::errc::result_out_of_range) {  // 0 or infinity; strtod would follow the locale of the program
    static const locale_t kC = newlocale(LC_ALL_MASK, "C", nullptr);
    return strtod_l(std::string(text).c_str(), nullptr, kC);
  }
  if (error != std::errc()) return std::nullopt;
  return value;
}

std::optional<std::string> parse_raw_unicode(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    // The last of an odd number of backslashes begins an escape if u or U follows.
    if (text[0] == '\\') {
      std::size_t backslashes = text.find_first_not_of('\\');
      if (backslashes == std::string_view::npos) backslashes = text.size();
      const char letter = backslashes < text.size() ? text[backslashes] : '\0';
      const bool escape = backslashes % 2 == 1 && (letter == 'u' || letter == 'U');
      out.append(backslashes - (escape ? 1 : 0), '\\');
      text.remove_prefix(backslashes);
      if (!escape) continue;
      text.remove_prefix(1);
      const std::size_t digits = letter == 'u' ? 4 : 8;
      const auto value = hexadecimal(text, digits);
      if (!value || *value > 0x10ffff) return std::nullopt;
      append_utf8(out, *value);
      text.remove_prefix(digits);
    } else {
      append_utf8(out, static_cast<unsigned char>(text[0]));
      text.remove_prefix(1);
    }
  }
  return out;
}

std::optional<std::size_t> latin1_from_utf8(std::string_view text, std::uint8_t* out) {
  std::size_t size = 0;
  while (!text.empty()) {
    const char32_t c = take_code_point(text);
    if (c > 0xff) return std::nullopt;
    out[size++] = static_cast<std::uint8_t>(c);
  }
  return size;
}

std::string utf8_from_latin1(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size());
  for (const char c : bytes) append_utf8(text, static_cast<unsigned char>(c));
  return text;
}

}  // namespace tessera::pickle
