#pragma once
/// \file
/// `.metadata` of PyTorch's distributed checkpoint (1.13 and every 2.x), as plain columns.
/// See docs/formats/dcp_metadata.md. Source: torch/distributed/checkpoint/metadata.py, filesystem.py.
///
/// Laws: equal(read(write(m)), m); write(read(write(m))) == write(m); write is deterministic; of a checkpoint of n
/// chunks both are O(n log n) comparisons of offsets at worst and O(n) where PyTorch's order of chunks is kept, with no
/// allocation per chunk.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/file.h"
#include "tessera/base/state_path.h"
#include "tessera/format/dcp_dialect.h"
#include "tessera/format/pickle_value.h"
#include "tessera/layout/box.h"
#include "tessera/layout/tensor_properties.h"

namespace tessera::dcp {

/// Where an item lies: `_StorageInfo`.
struct StoredItem {
  static constexpr std::uint32_t kNoFile = UINT32_MAX;
  std::uint32_t file = kNoFile;  ///< into Metadata::files; kNoFile: storage_data has no such item
  std::uint32_t transforms = 0;  ///< into Metadata::transforms; 0 for none
  std::int64_t offset_bytes = 0;
  std::int64_t length_bytes = 0;
  bool operator==(const StoredItem&) const = default;
};

/// One name of state_dict_metadata: a tensor of chunks, or an object.
struct MetadataEntry {
  std::string name;
  bool is_tensor = false;
  // Of a tensor:
  TensorProperties properties;
  std::vector<std::int64_t> shape;
  /// In PyTorch's order; not validated against the shape. Offsets and sizes are >= 0 and neither their sums nor the
  /// bytes of a chunk overflow.
  BoxList chunks;
  /// items[i] is where chunk i lies; one item for an object. PyTorch finds an item by name and offsets, so chunks with
  /// equal offsets (empty shards) have equal items.
  std::vector<StoredItem> items;
  bool operator==(const MetadataEntry&) const = default;
};

/// A name in `planner_data` that isn't in state_dict_metadata.
struct UnclaimedPath {
  std::string name;
  Path path;
  bool operator==(const UnclaimedPath&) const = default;
};

/// A stored item that no chunk or object of state_dict_metadata claims.
struct UnclaimedItem {
  std::string name;
  std::optional<std::vector<std::int64_t>> offsets;
  StoredItem item;
  bool operator==(const UnclaimedItem&) const = default;
};

struct StorageMeta {
  enum class PathKind : std::uint8_t { text, posix_path, windows_path };
  std::optional<std::string> checkpoint_id;
  PathKind checkpoint_id_kind = PathKind::text;  ///< a str, or which pathlib path; the pure ones count as these
  std::optional<std::string> save_id, load_id;
  std::vector<std::string> modules;
  bool operator==(const StorageMeta&) const = default;
};

/// A field that this version doesn't know: kept, and written back. `value` lives in `Metadata::extra_tree`.
struct ExtraField {
  std::string name;
  pickle::NodeRef value;
};

struct Metadata {
  std::vector<MetadataEntry> entries;  ///< in the file's order; names are unique
  /// Relative paths as the file has them, unique. `read` numbers them in the order of their first use in `entries`,
  /// then in `unclaimed`, and so for `transforms`.
  std::vector<std::string> files;
  std::vector<std::vector<std::string>> transforms = {
      {}};  ///< unique lists of transform descriptors; [0] is the empty one
  /// planner_data, aligned with `entries` (an empty path: the name isn't in it); nothing if planner_data is None or of
  /// another kind than a dict of str to tuples of str and int (then it is in `extra` as "planner_data").
  std::optional<std::vector<Path>> paths;
  std::vector<UnclaimedPath> unclaimed_paths;  ///< the rest of planner_data, where `paths` is set
  std::vector<UnclaimedItem> unclaimed;        ///< in the file's order
  std::optional<StorageMeta> storage_meta;
  std::optional<std::string> version;  ///< of torch_2_14, which may have it as None, alone
  Dialect dialect = Dialect::torch_2;
  std::shared_ptr<pickle::Tree> extra_tree;
  std::vector<ExtraField> extra;               ///< unknown fields of Metadata
  std::vector<ExtraField> storage_meta_extra;  ///< unknown fields of StorageMeta, and a checkpoint_id of another kind

  /// The entry called `name`, or null. O(n).
  const MetadataEntry* find(std::string_view name) const;
};

/// Whether a and b say the same, in the same order; the numbers of files and transforms don't count, nor does a dialect
/// that nothing in the file shows (torch_2_0 or torch_2 of a state without tensors).
bool equal(const Metadata& a, const Metadata& b);

/// Reads `.metadata`. Throws `Error(corrupt)` for what is no DCP metadata or contradicts itself (duplicate names, two
/// items for one chunk, ranks that differ, negative or overflowing numbers), with the name of the tensor and the field;
/// a dtype, a class or a field of an inner class that we don't know is `Error(unsupported)` naming it. Peak memory: 1.2
/// times the file as PyTorch writes it, six times otherwise.
Metadata read(const ByteSource& source);

/// Writes what PyTorch reads, with the class names of `metadata.dialect`. Files and transforms that no item refers to
/// are left out; an extra "planner_data" is left out where `paths` is set. Throws `Error(invalid_argument)` for a
/// metadata that no file can say (items that don't match chunks, chunks of equal offsets with different items, bad
/// indices, negative numbers, duplicate names, a version without torch_2_14).
Bytes write(const Metadata& metadata);

}  // namespace tessera::dcp
