#pragma once
// The names that a user gives on the command line, looked up in a checkpoint.

#include <cstddef>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"

namespace tessera::cli {

// Indices into Checkpoint::tensors() and objects(), in the checkpoint's order, each once.
struct NamedItems {
  std::vector<std::size_t> tensors, objects;
};

// What `names` (names or globs) mean; everything if there are none. Throws Error(not_found) for one that means nothing,
// with the names that come close.
NamedItems find_names(const checkpoint::Checkpoint& checkpoint, const std::vector<std::string>& names);

}  // namespace tessera::cli
