#pragma once
/// \file
/// The sizes of a checkpoint's tensors by the prefixes of their names.

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"

namespace tessera::checkpoint {

/// A prefix of names: a key of the nested state dict, or a part of a name between dots.
struct SizeNode {
  std::string name;                        ///< the last part alone; empty for the root
  std::uint64_t bytes = 0;                 ///< of the elements of all tensors below
  std::uint64_t tensors = 0, objects = 0;  ///< below, or with this name
  std::vector<SizeNode> children;          ///< the largest first; of equal ones by name
};

/// The greatest depth of a tree. A node at this depth has the rest of the name.
inline constexpr std::size_t kMaxSizeTreeDepth = 64;

/// Returns the tree of some tensors and objects (indices into Checkpoint::tensors() and objects()). Keys are those of
/// the nested state dict if they are recorded, else the name; each is split at dots. Levels deeper than `depth` (at
/// least 1) are added to the one above. Reads no tensor data.
SizeNode size_tree(const Checkpoint& checkpoint, const std::vector<std::size_t>& tensors,
                   const std::vector<std::size_t>& objects, std::size_t depth = kMaxSizeTreeDepth);

}  // namespace tessera::checkpoint
