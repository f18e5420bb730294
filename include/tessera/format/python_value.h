#pragma once
/// \file
/// Readable forms of inert values: Python's `repr`, JSON and type names, and whether the value is understood.
///
/// Understood types are None, bool, int of any size, float, str, bytes, bytearray, list, tuple, dict, set, frozenset,
/// OrderedDict, torch.Size (of at most 1000 ints), torch.dtype, torch.device, complex, and containers of these.
/// Anything else is opaque: it is kept and can be displayed, but not interpreted.

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/format/pickle_value.h"

namespace tessera::pickle {

/// Returns Python's name of the type: "int", "OrderedDict", "torch.Size", "dtype". For an opaque value, returns the
/// name of the callable: "argparse.Namespace".
std::string type_name(NodeRef value);

/// Returns exactly Python's `repr` of an understood value ("{'a': [1, 2.5]}", "b'\\x00'", "1e-05"). Opaque parts are
/// printed as "<module.name(...)>". Truncates at `limit` bytes and appends "..."; truncated text has the quotes for the
/// part that is printed. Throws `Error(corrupt)` if the value nests deeper than 500, or if the parts that occur more
/// than once amount to more than 100,000 values, or 16 MiB of text, plus eight times the parts that occur once.
/// `opaque_reason` and `to_json` throw likewise.
std::string repr(NodeRef value, std::size_t limit = SIZE_MAX);

/// Returns why a value is opaque ("calls argparse.Namespace, which is not executed"), or nothing if every part of it is
/// understood.
std::optional<std::string> opaque_reason(NodeRef value);

/// Returns JSON for display: tuples, sets and sizes as arrays, dicts as objects (keys other than strings as their
/// `repr`), bytes as Latin-1 text, dtypes and devices as their names, opaque parts as null. Values that JSON numbers
/// cannot represent (ints beyond 64 bits, non-finite floats, complex numbers) become strings with their `repr`. See
/// docs/formats/objects.md.
nlohmann::ordered_json to_json(NodeRef value);

/// Returns JSON that preserves the value except for sharing, or nothing if the value is opaque or contains itself.
/// None, bool, int of 64 bits, finite float, str, list and dict with str keys are plain JSON. Other values are tagged
/// objects such as {"__tessera__": "tuple", "items": [...]}, listed in docs/formats/objects.md.
///
/// Law: `equal(from_lossless_json(*to_lossless_json(v), t), v)`, also if the JSON was converted to text and back.
std::optional<nlohmann::ordered_json> to_lossless_json(NodeRef value);
/// The inverse of `to_lossless_json`. Throws `Error(corrupt)` for JSON that `to_lossless_json` does not write.
NodeRef from_lossless_json(const nlohmann::ordered_json& json, Tree& tree);

/// Returns the dtype if the value is a torch.dtype (a global such as torch.float32).
std::optional<DType> as_dtype(NodeRef value);
/// Returns the sizes if the value is a torch.Size, a tuple or a list of ints of 64 bits.
std::optional<std::vector<std::int64_t>> as_int_list(NodeRef value);

}  // namespace tessera::pickle
