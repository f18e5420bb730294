#pragma once
// The nested state dict that a set of paths describes.
// PyTorch: unflatten_state_dict in torch/distributed/checkpoint/_nested_dict.py, set_element in _traverse.py.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/source/expansion.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/base/state_path.h"

namespace tessera::checkpoint {

struct Nested {
  enum class Kind : std::uint8_t { none, leaf, dict, list };
  Kind kind = Kind::none;
  std::size_t leaf = 0;                           // value passed to set()
  std::vector<std::string> keys;                  // of a dict, in order of insertion
  std::vector<std::unique_ptr<Nested>> children;  // of a dict (aligned with keys) or a list

  // Stores `leaf` at `path`. String keys make dicts and integers make lists; gaps in lists are null. Throws
  // Error(corrupt) if the path is taken, or passes through a leaf or a container of the other kind. `name` is for
  // messages.
  // Error(corrupt) if gaps in lists exceed `budget`.
  void set(const Path& path, std::size_t leaf, const std::string& name, ExpansionBudget& budget);

 private:
  Nested& child(const Key& item, const std::string& name, ExpansionBudget& budget);
  TextMap<std::size_t> positions_;  // of keys
};

}  // namespace tessera::checkpoint
