#pragma once
/// \file
/// What an inert value means to a person: Python's `repr`, a JSON form, its type's name, and whether we understand it.
///
/// Understood are None, bool, int of any size, float, str, bytes, bytearray, list, tuple, dict, set, frozenset,
/// OrderedDict, torch.Size, torch.dtype, torch.device, complex, and what is made of them. Anything else is opaque: it
/// is carried, and shown as what it is.

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/format/pickle_value.h"

namespace tessera::pickle {

/// Python's type name: "int", "OrderedDict", "torch.Size", "dtype", or for an opaque one what would be called,
/// "argparse.Namespace".
std::string type_name(NodeRef value);

/// Python's `repr` of an understood value, exactly ("{'a': [1, 2.5]}", "b'\\x00'", "1e-05"); opaque parts print as
/// "<module.name(...)>". Cut at `limit` bytes with "..." behind. Throws `Error(corrupt)` for what nests deeper than 500
/// or, by sharing, stands for far more than it holds (100,000 values or 16 MiB of text, and eight times what is there);
/// so do the two below.
std::string repr(NodeRef value, std::size_t limit = SIZE_MAX);

/// Why a value is opaque ("calls argparse.Namespace, which is not executed"); nothing if every part of it is
/// understood.
std::optional<std::string> opaque_reason(NodeRef value);

/// A JSON form for readers: tuples, sets and sizes as arrays, dicts as objects (keys that are no strings as their
/// `repr`), bytes as Latin-1 text, dtypes and devices as their names; null for opaque parts. Ints beyond 64 bits,
/// non-finite floats and complex numbers, which JSON numbers can't say, become their `repr` as a string; see
/// docs/formats/objects.md.
nlohmann::ordered_json to_json(NodeRef value);

/// JSON that loses nothing, sharing aside, or nothing where the value is opaque or contains itself. Plain JSON are
/// None, bool, int of 64 bits, finite float, str, list, dict with str keys. Tagged objects ({"__tessera__": "tuple",
/// "items":
/// [...]}, ...) say the rest; docs/formats/objects.md lists them.
///
/// Law: `equal(from_lossless_json(*to_lossless_json(v), t), v)`, also when the JSON was text in between.
std::optional<nlohmann::ordered_json> to_lossless_json(NodeRef value);
/// The inverse of `to_lossless_json`. Throws `Error(corrupt)` for what that doesn't write.
NodeRef from_lossless_json(const nlohmann::ordered_json& json, Tree& tree);

/// The value as torch.dtype (a global torch.float32, ...), if it is one.
std::optional<DType> as_dtype(NodeRef value);
/// The sizes, if the value is a torch.Size, a tuple or a list of ints that fit.
std::optional<std::vector<std::int64_t>> as_int_list(NodeRef value);

}  // namespace tessera::pickle
