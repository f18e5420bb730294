#pragma once
/// \file
/// The `.metadata` file of PyTorch's distributed checkpoints (1.13 and every 2.x), as plain columns.
/// See docs/formats/dcp_metadata.md. Source: torch/distributed/checkpoint/metadata.py, filesystem.py.
///
/// Laws: equal(read(write(m)), m); write(read(write(m))) == write(m). `write` is deterministic. For n chunks, both cost
/// O(n) if the chunks are in PyTorch's order and at most O(n log n) comparisons of offsets otherwise. Neither allocates
/// per chunk.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/file.h"
#include "tessera/base/function_ref.h"
#include "tessera/base/state_path.h"
#include "tessera/format/dcp_dialect.h"
#include "tessera/format/pickle_value.h"
#include "tessera/layout/box.h"
#include "tessera/layout/tensor_properties.h"

namespace tessera::dcp {

/// The location of a stored item (`_StorageInfo`).
struct StoredItem {
  static constexpr std::uint32_t kNoFile = UINT32_MAX;
  std::uint32_t file = kNoFile;  ///< index into Metadata::files; kNoFile if storage_data does not have the item
  std::uint32_t transforms = 0;  ///< index into Metadata::transforms; 0 for none
  std::int64_t offset_bytes = 0;
  std::int64_t length_bytes = 0;
  bool operator==(const StoredItem&) const = default;
};

/// One entry of state_dict_metadata: a tensor made of chunks, or an object.
struct MetadataEntry {
  std::string name;
  bool is_tensor = false;
  // Tensors only:
  TensorProperties properties;
  std::vector<std::int64_t> shape;
  /// In the order of the file, which is the order in which PyTorch reads them. Not validated against the shape. Offsets
  /// and sizes are >= 0. Neither their sums nor the number of bytes of a chunk overflow.
  BoxList chunks;
  /// items[i] is the location of chunk i. An object has one item. PyTorch looks up an item by name and offsets, so
  /// chunks with equal offsets (empty shards) have equal items.
  std::vector<StoredItem> items;
  bool operator==(const MetadataEntry&) const = default;
};

/// A name in `planner_data` that is not in state_dict_metadata.
struct UnclaimedPath {
  std::string name;
  Path path;
  bool operator==(const UnclaimedPath&) const = default;
};

/// A stored item that belongs to no chunk or object of state_dict_metadata.
struct UnclaimedItem {
  std::string name;
  std::optional<std::vector<std::int64_t>> offsets;
  StoredItem item;
  bool operator==(const UnclaimedItem&) const = default;
};

struct StorageMeta {
  enum class PathKind : std::uint8_t { text, posix_path, windows_path };
  std::optional<std::string> checkpoint_id;
  PathKind checkpoint_id_kind = PathKind::text;  ///< str or a pathlib class; pure paths count as concrete ones
  std::optional<std::string> save_id, load_id;
  std::vector<std::string> modules;
  bool operator==(const StorageMeta&) const = default;
};

/// A field that this version does not know. It is kept and written back. `value` is stored in `Metadata::extra_tree`.
struct ExtraField {
  std::string name;
  pickle::NodeRef value;
};

struct Metadata {
  std::vector<MetadataEntry> entries;  ///< in the file's order; names are unique
  /// Relative paths as in the file, unique. `read` numbers them by first use in `entries`, then in `unclaimed`;
  /// likewise `transforms`.
  std::vector<std::string> files;
  std::vector<std::vector<std::string>> transforms = {
      {}};  ///< unique lists of transform descriptors; [0] is the empty list
  /// planner_data, aligned with `entries`; an empty path means that planner_data does not have the name. Not set if
  /// planner_data is None, or not a dict of str to tuples of str and int (then `extra` has it as "planner_data").
  std::optional<std::vector<Path>> paths;
  std::vector<UnclaimedPath> unclaimed_paths;  ///< the rest of planner_data, if `paths` is set
  std::vector<UnclaimedItem> unclaimed;        ///< in the file's order
  std::optional<StorageMeta> storage_meta;
  std::optional<std::string> version;  ///< torch_2_14 only, where it may also be None
  Dialect dialect = Dialect::torch_2;
  std::shared_ptr<pickle::Tree> extra_tree;
  std::vector<ExtraField> extra;               ///< unknown fields of Metadata
  std::vector<ExtraField> storage_meta_extra;  ///< unknown fields of StorageMeta; a checkpoint_id of another type

  /// Returns the entry named `name`, or null. O(n).
  const MetadataEntry* find(std::string_view name) const;
};

/// Returns whether `a` and `b` describe the same checkpoint, with everything in the same order. The numbering of files
/// and transforms is ignored, and so is a dialect that the file does not show (torch_2_0 or torch_2 without tensors).
bool equal(const Metadata& a, const Metadata& b);

/// Reads `.metadata`. Throws `Error(corrupt)`, naming the tensor and the field, if the bytes are not DCP metadata or
/// are inconsistent: duplicate names, two items for one chunk, different numbers of dimensions, negative or overflowing
/// numbers. Throws `Error(unsupported)` naming an unknown dtype, an unknown class or an unknown field of an inner
/// class. Peak memory: 1.2 times the file if it is as PyTorch writes it, six times otherwise.
Metadata read(const ByteSource& source);

/// Writes `.metadata` for PyTorch, with the class names of `metadata.dialect`. Leaves out files and transforms that no
/// item refers to, and an extra "planner_data" if `paths` is set. Throws `Error(invalid_argument)` if no file can hold
/// `metadata`: items that do not match the chunks, different items for chunks of equal offsets, bad indices, negative
/// numbers, duplicate names, a version in another dialect than torch_2_14.
Bytes write(const Metadata& metadata);
/// Writes the same bytes in pieces of about 1 MiB, which `sink` gets in order.
void write(const Metadata& metadata, FunctionRef<void(ByteView bytes)> sink);

}  // namespace tessera::dcp
