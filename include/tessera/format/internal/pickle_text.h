#pragma once
// Text in pickles: UTF-8 in binary opcodes, Python's escapes in the opcodes of protocol 0.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::pickle {

// Returns whether `text` is UTF-8 in which lone surrogates may occur as three bytes, as with Python's "surrogatepass".
bool is_python_utf8(std::string_view text);
// Returns the length (1 to 4 bytes) of the first sequence of such text, or 0 if `text` does not start with one.
std::size_t python_utf8_sequence_length(std::string_view text);

// Returns whether `text` is strict UTF-8.
bool is_utf8(std::string_view text);
bool is_surrogate(char32_t code_point);

void append_utf8(std::string& out, char32_t code_point);

// Removes the first code point from `text`, which must not be empty, and returns it. A byte that starts no sequence of
// Python UTF-8 is U+DC80 to U+DCFF, as with Python's "surrogateescape".
char32_t take_code_point(std::string_view& text);

// Returns the bytes of a quoted Python 2 literal ('a\x00b' or "..."), or nothing if it is malformed.
std::optional<std::string> parse_quoted_bytes(std::string_view literal);

// Parses a float in Python's text form ("1.5", "1e-05", "-inf", "nan"). Returns nothing if the text is not a float.
std::optional<double> parse_float(std::string_view text);

// Decodes "raw-unicode-escape" (Latin-1 with \uXXXX and \UXXXXXXXX) to UTF-8. Returns nothing if an escape is
// malformed.
std::optional<std::string> parse_raw_unicode(std::string_view text);

// Writes `text` as Latin-1 to `out`, which has room for text.size() bytes, and returns the number of bytes written.
// Returns nothing if a code point is above U+00FF. `utf8_from_latin1` is the inverse.
std::optional<std::size_t> latin1_from_utf8(std::string_view text, std::uint8_t* out);
std::string utf8_from_latin1(std::string_view bytes);

}  // namespace tessera::pickle
