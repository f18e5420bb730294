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
#include "tessera/checkpoint/checkpoint.h"

namespace tessera::checkpoint {

struct Nested {
  enum class Kind : std::uint8_t { none, leaf, dict, list };
  // A str, or another value as JSON: the dict {1: 2, "1": 3} has two keys.
  struct DictKey {
    std::string text;
    bool is_json = false;
    bool operator==(const DictKey&) const = default;
  };
  Kind kind = Kind::none;
  std::size_t leaf = 0;                           // value passed to set()
  std::vector<DictKey> keys;                      // of a dict, in order of insertion
  std::vector<std::unique_ptr<Nested>> children;  // of a dict (aligned with keys) or a list

  // Stores `leaf` at `path`. String keys make dicts and integers make lists; gaps in lists are null. A part that `keys`
  // has, with its JSON, is that key of a dict. Throws Error(corrupt) if the path is taken, if it passes through a leaf
  // or a container of the other kind, or if gaps in lists exceed `budget`. `name` is for messages.
  void set(const Path& path, std::size_t leaf, const std::string& name, ExpansionBudget& budget,
           const PathKeys& keys = {});

 private:
  Nested& child(const Key& item, const std::string* json, const std::string& name, ExpansionBudget& budget);
  // Of keys; those that are no str are rare.
  TextMap<std::size_t> positions_;
  std::unique_ptr<TextMap<std::size_t>> positions_of_json_;
};

}  // namespace tessera::checkpoint
