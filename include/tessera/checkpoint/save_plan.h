#pragma once
/// \file
/// A rank's save plan, as plain columns: each name once, then one item per chunk and object.
///
/// Law: `SavePlan::decode(plan.encode_entries(), plan.encode_items()) == plan`, except for `source`, which is local to
/// the rank and not encoded.
///
/// PyTorch: torch/distributed/checkpoint/planner.py (SavePlan, WriteItem, MetadataIndex).

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/state_path.h"
#include "tessera/layout/box.h"
#include "tessera/layout/tensor_properties.h"

namespace tessera::checkpoint {

/// The identity of a stored chunk, by name and offsets, or of an object, by name.
struct MetadataIndex {
  std::string fqn;
  std::optional<std::vector<std::int64_t>> offset;
  std::optional<std::size_t> index;  ///< a hint, ignored by ==
  bool operator==(const MetadataIndex& other) const { return fqn == other.fqn && offset == other.offset; }
};
/// Returns "'model.weight' at [0, 4]".
std::string to_string(const MetadataIndex& index);

enum class WriteItemType : std::uint8_t {
  byte_io,  ///< an object
  tensor,   ///< a full tensor
  shard,    ///< a part of a tensor
};

class SavePlan {
 public:
  /// What all items of a name share, on all ranks.
  struct Entry {
    std::string name;
    Path path;
    bool is_tensor = true;
    std::optional<TensorProperties> properties = TensorProperties();  ///< nullopt if not known, then without items
    std::vector<std::int64_t> shape;
    bool operator==(const Entry&) const = default;
  };
  /// The chunk of the flat state that an item saves.
  struct Source {
    std::uint32_t entry = 0, chunk = 0;
    bool operator==(const Source&) const = default;
  };
  /// A row of the plan.
  struct WriteItem {
    std::uint32_t entry = 0;
    Source source;
    BoxView box;  ///< of a chunk; valid as long as the plan is
    std::uint64_t stored_bytes = 0;
  };

  /// Adds an entry and returns its number. Names must be unique.
  std::uint32_t add_entry(Entry entry);
  void add_chunk(std::uint32_t entry, BoxView box, Source source);
  void add_object(std::uint32_t entry, Source source);

  /// Sets the size of a chunk in storage, which does not depend on its elements.
  void set_stored_bytes(std::size_t i, std::uint64_t bytes) { items_[i].stored_bytes = bytes; }

  const std::vector<Entry>& entries() const { return entries_; }
  std::size_t size() const { return items_.size(); }
  WriteItem operator[](std::size_t i) const;
  WriteItemType type(std::size_t i) const;
  MetadataIndex index(std::size_t i) const;

  /// Serialize entries and items separately, because ranks often have the same entries. Deterministic.
  Bytes encode_entries() const;
  Bytes encode_items() const;
  /// Reads both back. Throws `Error(corrupt)` for malformed bytes.
  static SavePlan decode(ByteView entries, ByteView items);

  bool operator==(const SavePlan&) const = default;

 private:
  struct Item {
    std::uint32_t entry;
    Source source;
    std::uint64_t box_begin;  // in coordinates_
    std::uint64_t stored_bytes;
    bool operator==(const Item&) const = default;
  };
  std::vector<Entry> entries_;
  std::vector<Item> items_;
  std::vector<std::int64_t> coordinates_;  // offsets, then sizes, of each chunk
};

}  // namespace tessera::checkpoint
