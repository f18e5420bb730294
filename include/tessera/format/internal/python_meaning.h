#pragma once
// What an inert value is, as far as we know. Strict: a call with other arguments than Python writes is opaque.

#include <string>

#include "tessera/format/pickle_value.h"

namespace tessera::pickle {

enum class Meaning : std::uint8_t { plain, ordered_dict, size, dtype, device, complex, opaque };

// Of the value itself, whatever is inside of it.
Meaning meaning_of(NodeRef value);

// Each of a value of that meaning.
std::span<const NodeRef> size_items(NodeRef size);
std::string dtype_text(NodeRef dtype);  // "torch.float32"
struct Device {
  std::string_view type;
  NodeRef index;  // an int, or None
};
Device device_of(NodeRef device);
struct Complex {
  double real, imaginary;
};
Complex complex_of(NodeRef value);

// What a callable is called: "os.system", "builtins.getattr(...)", "os.system(...)"; of printable characters.
std::string callable_name(NodeRef callable);

}  // namespace tessera::pickle
