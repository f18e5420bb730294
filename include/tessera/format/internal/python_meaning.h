#pragma once
// Classifies inert values. Strict: a call with other arguments than Python writes is opaque.

#include <string>

#include "tessera/format/pickle_value.h"

namespace tessera::pickle {

enum class Meaning : std::uint8_t { plain, ordered_dict, size, dtype, device, complex, opaque };

// Classifies the value itself, without its contents, in bounded time: a torch.Size of more than 1000 ints is opaque.
Meaning meaning_of(NodeRef value);

// Each requires a value of the meaning in its name.
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

// Returns a printable name of a callable: "os.system", "builtins.getattr(...)", "os.system(...)".
std::string callable_name(NodeRef callable);

}  // namespace tessera::pickle
