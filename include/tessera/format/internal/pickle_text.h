#pragma once
// The text that pickles hold: UTF-8 in binary opcodes, Python's escapes in the opcodes of protocol 0.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::pickle {

// UTF-8 in which lone surrogates may stand as their three bytes, as Python's "surrogatepass" has them.
bool is_python_utf8(std::string_view text);
// Bytes of the sequence of such text that `text` begins with (1 to 4), or 0 if it begins with none.
std::size_t python_utf8_sequence_length(std::string_view text);

// UTF-8 without such.
bool is_utf8(std::string_view text);
bool is_surrogate(char32_t code_point);

void append_utf8(std::string& out, char32_t code_point);

// The code point that `text`, which is_python_utf8 and not empty, begins with; it is removed from `text`.
char32_t take_code_point(std::string_view& text);

// The bytes of a quoted Python 2 literal ('a\x00b' or "..."); nothing if it is malformed.
std::optional<std::string> parse_quoted_bytes(std::string_view literal);

// A float as Python writes it in text ("1.5", "1e-05", "-inf", "nan"); nothing if it is none.
std::optional<double> parse_float(std::string_view text);

// UTF-8 of Latin-1 text in which \uXXXX and \UXXXXXXXX are escapes ("raw-unicode-escape"); nothing if one is malformed.
std::optional<std::string> parse_raw_unicode(std::string_view text);

// Writes the bytes of text that is Latin-1 to `out`, of at least as many bytes as `text` has, and returns how many they
// are; nothing if a code point is past U+00FF. And the other way round.
std::optional<std::size_t> latin1_from_utf8(std::string_view text, std::uint8_t* out);
std::string utf8_from_latin1(std::string_view bytes);

}  // namespace tessera::pickle
