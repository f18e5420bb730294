#pragma once
// Python's text form of single values: repr of floats, strings and bytes.

#include <string>
#include <string_view>

#include "tessera/base/bytes.h"
#include "tessera/format/pickle_value.h"

namespace tessera::pickle {

class Walk;
// As `repr`, as a part of another walk.
std::string repr_in(Walk& walk, NodeRef value);

// Returns "0.1", "1e-05", "1e+16", "-0.0", "nan": the fewest digits that give the same double.
std::string float_repr(double value);

// "(1+2j)", "-0j".
std::string complex_repr(double real, double imaginary);

// Quotes and escapes. Stops after about `limit` bytes; longer output is incomplete, and has the quotes for its part of
// the text. Takes a time that depends on `limit` alone.
std::string string_repr(std::string_view text, std::size_t limit = SIZE_MAX);
std::string bytes_repr(ByteView bytes, std::size_t limit = SIZE_MAX);
std::string byte_array_repr(ByteView bytes, std::size_t limit = SIZE_MAX);

}  // namespace tessera::pickle
