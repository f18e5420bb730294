#pragma once
/// \file
/// The description of a checkpoint of Meta's torch_checkpointing: `metadata.pkl`, and the names of its files.
/// See docs/formats/torch_checkpointing.md. Source: torch_checkpointing 0.1.0, distributed_metadata.py,
/// dtensor_metadata.py, checkpoint_layout.py.
///
/// A checkpoint has items, such as "model" and "optimizer". Each rank saves its part of each item to a file of its own.
/// `metadata.pkl` states how tensors in these files are sharded; it lists only items that were saved with a resharder.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/dtype.h"
#include "tessera/base/file.h"
#include "tessera/base/state_path.h"
#include "tessera/layout/placement.h"

namespace tessera::torch_checkpointing {

inline constexpr std::string_view kMetadataFileName = "metadata.pkl";
/// The largest number of ranks that a reader accepts.
inline constexpr std::int64_t kMaxRanks = 1 << 22;

/// A device mesh. `ranks` are in row-major order, unique, and as many as the product of `shape`.
struct Mesh {
  std::string device_type = "cpu";
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> ranks;
  std::vector<std::string> dim_names;                     ///< empty if the mesh has none
  std::unordered_map<std::int64_t, std::int64_t> places;  ///< the index of each rank in `ranks`; `write` ignores it
};

/// How a tensor is sharded, and the ranks that hold it so.
struct Group {
  DType dtype = DType::float32;
  std::vector<std::int64_t> shape;
  std::shared_ptr<const Mesh> mesh;
  Placements placements;  ///< shards and replicas, one per dimension of the mesh
};

/// A tensor of an item. Ranks may hold it in several ways.
struct TensorEntry {
  Path path;  ///< in the item; empty if the item is the tensor
  std::vector<Group> groups;
};

enum class Serialization : std::uint8_t { torch, safetensors };
struct FileLayout {
  std::string file;  ///< relative to the checkpoint's directory
  Serialization serialization = Serialization::torch;
};

struct Item {
  std::string key;
  std::vector<TensorEntry> entries;
  std::map<std::int64_t, FileLayout> files;  ///< of the ranks whose file does not have the default name
};

struct CheckpointMetadata {
  std::string version = "2.0";
  std::int64_t ranks = 1;
  std::vector<Item> items;
};

/// Reads `metadata.pkl` of version 1.0 or 2.0. Placements are normalized, and ranks and meshes are valid. Throws
/// `Error(unsupported)`, naming it, for another version, a kind of sharding metadata that a program defines itself, and
/// items that are stored as JSON or raw bytes; `Error(corrupt)`, also if values that the file repeats take more than 64
/// MiB and 16 times the file.
CheckpointMetadata read(const ByteSource& source);
/// Returns `metadata.pkl` of version 2.0. Throws `Error(invalid_argument)` if a key of a path is not UTF-8.
Bytes write(const CheckpointMetadata& metadata);

/// The default name of an item's file: `<item>_<rank>.pt`.
struct FileName {
  std::string item;
  std::int64_t rank = 0;
  bool operator==(const FileName&) const = default;
};
std::string to_string(const FileName& name);
/// Returns the parts of such a name, or nothing for another one.
std::optional<FileName> parse_file_name(std::string_view name);
/// Returns whether an item may have this name: letters, digits, '-' and '_'.
bool is_item_key(std::string_view key);

}  // namespace tessera::torch_checkpointing
