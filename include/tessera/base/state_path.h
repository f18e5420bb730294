#pragma once
/// \file
/// The path to a value in a nested state dict.

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace tessera {

/// A key of a dict or an index of a list: a string or an int.
using Key = std::variant<std::string, std::int64_t>;

/// The keys and indices from the root of a state dict to a value in it, outermost first.
using Path = std::vector<Key>;

}  // namespace tessera
