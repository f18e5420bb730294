#include "format/python/text.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <cstdlib>

#include "format/python/printable.h"
#include "tessera/format/internal/pickle_text.h"

namespace tessera::pickle {

namespace {

// Does not append ".0" to integral values.
std::string short_float(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  // d.ddde+XX, from which Python's form is made: it writes an exponent below -4 and from 16 on.
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr;
  std::string_view text(buffer, static_cast<std::size_t>(end - buffer));
  const std::size_t e = text.find('e');
  const int exponent = std::atoi(std::string(text.substr(e + 1)).c_str());
  if (exponent < -4 || exponent >= 16) return std::string(text);
  const bool negative = text.front() == '-';
  std::string digits;
  for (const char c : text.substr(0, e)) {
    if (c >= '0' && c <= '9') digits.push_back(c);
  }
  std::string result = negative ? "-" : "";
  if (exponent < 0) return result + "0." + std::string(static_cast<std::size_t>(-exponent - 1), '0') + digits;
  const auto integral = static_cast<std::size_t>(exponent) + 1;
  if (digits.size() <= integral) return result + digits + std::string(integral - digits.size(), '0');
  return result + digits.substr(0, integral) + "." + digits.substr(integral);
}

// Looks at as much of `text` as is quoted, so that its time depends on `limit`.
char quote_for(std::string_view text, std::size_t limit) {
  text = text.substr(0, limit);
  return text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos ? '"' : '\'';
}

// Returns the escape of one character, or nothing if it needs none.
std::string_view letter_escape(char32_t c) {
  switch (c) {
    case '\\':
      return "\\\\";
    case '\t':
      return "\\t";
    case '\n':
      return "\\n";
    case '\r':
      return "\\r";
    default:
      return {};
  }
}

std::string quoted_bytes(ByteView bytes, char quote, char escaped_quote, std::size_t limit) {
  std::string out = "b";
  out.push_back(quote);
  for (const std::uint8_t byte : bytes) {
    if (out.size() > limit) break;
    if (const auto escape = letter_escape(byte); !escape.empty()) {
      out += escape;
    } else if (byte == static_cast<std::uint8_t>(escaped_quote)) {
      out.append(1, '\\').push_back(escaped_quote);
    } else if (byte < 0x20 || byte >= 0x7f) {
      fmt::format_to(std::back_inserter(out), "\\x{:02x}", byte);
    } else {
      out.push_back(static_cast<char>(byte));
    }
  }
  out.push_back(quote);
  return out;
}

}  // namespace

std::string float_repr(double value) {
  std::string text = short_float(value);
  if (text.find_first_of(".en") == std::string::npos) text += ".0";
  return text;
}

std::string complex_repr(double real, double imaginary) {
  std::string i = short_float(imaginary) + "j";
  if (real == 0 && !std::signbit(real)) return i;
  const bool has_sign = i.front() == '-';
  return "(" + short_float(real) + (has_sign ? "" : "+") + i + ")";
}

std::string string_repr(std::string_view text, std::size_t limit) {
  const char quote = quote_for(text, limit);
  std::string out(1, quote);
  while (!text.empty() && out.size() <= limit) {
    const char32_t c = take_code_point(text);
    if (const auto escape = letter_escape(c); !escape.empty()) {
      out += escape;
    } else if (c == static_cast<char32_t>(quote)) {
      out.append(1, '\\').push_back(quote);
    } else if (c >= 0x20 && c < 0x7f) {
      out.push_back(static_cast<char>(c));
    } else if (c >= 0x80 && is_printable(c)) {
      append_utf8(out, c);
    } else if (c <= 0xff) {
      fmt::format_to(std::back_inserter(out), "\\x{:02x}", static_cast<std::uint32_t>(c));
    } else if (c <= 0xffff) {
      fmt::format_to(std::back_inserter(out), "\\u{:04x}", static_cast<std::uint32_t>(c));
    } else {
      fmt::format_to(std::back_inserter(out), "\\U{:08x}", static_cast<std::uint32_t>(c));
    }
  }
  out.push_back(quote);
  return out;
}

std::string bytes_repr(ByteView bytes, std::size_t limit) {
  const char quote = quote_for(as_text(bytes), limit);
  return quoted_bytes(bytes, quote, quote, limit);
}

// Python escapes the apostrophe here whatever the quotes are.
std::string byte_array_repr(ByteView bytes, std::size_t limit) {
  return "bytearray(" + quoted_bytes(bytes, quote_for(as_text(bytes), limit), '\'', limit) + ")";
}

}  // namespace tessera::pickle
