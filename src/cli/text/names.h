#pragma once
// Names on the command line, looked up in a checkpoint.

#include <cstddef>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"

namespace tessera::cli {

// Indices into Checkpoint::tensors() and objects(), in the checkpoint's order, each once.
struct NamedItems {
  std::vector<std::size_t> tensors, objects;
};

// Returns the tensors and objects that `names` (names or globs) match; all if there are none. Throws Error(not_found)
// for a name without a match; the message suggests similar names.
NamedItems find_names(const checkpoint::Checkpoint& checkpoint, const std::vector<std::string>& names);

}  // namespace tessera::cli
