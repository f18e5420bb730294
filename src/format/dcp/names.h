#pragma once
// The names of every class and field in `.metadata`, shared by reader and writer.

#include <array>
#include <cstddef>
#include <string_view>

#include "tessera/format/dcp_metadata.h"

namespace tessera::dcp {

enum class Class : std::uint8_t {
  metadata,
  tensor,
  object,
  chunk,
  properties,
  memory_format,
  index,
  storage_info,
  storage_meta,
};

inline constexpr std::size_t kDialectCount = static_cast<std::size_t>(Dialect::torch_2_14) + 1;

// The modules that contain the classes of a dialect.
struct Homes {
  std::string_view metadata, filesystem, properties, memory_format;
};
inline constexpr std::array<Homes, kDialectCount> kHomes = {{
    {"torch.distributed._shard.checkpoint.metadata", "torch.distributed._shard.checkpoint.filesystem",
     "torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"},
    {"torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem",
     "torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"},
    {"torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem",
     "torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"},
    {"torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem",
     "torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"},
}};

constexpr pickle::GlobalName class_name(Class what, Dialect dialect) {
  const Homes& homes = kHomes[static_cast<std::size_t>(dialect)];
  switch (what) {
    case Class::metadata:
      return {homes.metadata, "Metadata"};
    case Class::tensor:
      return {homes.metadata, "TensorStorageMetadata"};
    case Class::object:
      return {homes.metadata, "BytesStorageMetadata"};
    case Class::chunk:
      return {homes.metadata, "ChunkStorageMetadata"};
    case Class::properties:
      return {homes.properties, "TensorProperties"};
    case Class::memory_format:
      return {homes.properties, homes.memory_format};
    case Class::index:
      return {homes.metadata, "MetadataIndex"};
    case Class::storage_info:
      return {homes.filesystem, "_StorageInfo"};
    case Class::storage_meta:
      return {homes.metadata, "StorageMeta"};
  }
  return {};
}

inline constexpr pickle::GlobalName kSize = {"torch", "Size"};
inline constexpr pickle::GlobalName kLayout = {"torch.serialization", "_get_layout"};
inline constexpr pickle::GlobalName kGetattr = {"builtins", "getattr"};
inline constexpr std::array<std::string_view, 3> kMemoryFormats = {"TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST",
                                                                   "TORCH_PRESERVE_FORMAT"};
inline constexpr std::array<std::string_view, 2> kPathModules = {"pathlib", "pathlib._local"};

// The fields of each class in PyTorch's order; each struct is a `Fields` of `FieldReader` and of `FieldWriter`.

struct MetadataFields {
  enum : std::size_t { state_dict_metadata, planner_data, storage_data, storage_meta, version, count };
  static constexpr std::array<std::string_view, count> names = {"state_dict_metadata", "planner_data", "storage_data",
                                                                "storage_meta", "version"};
  static constexpr Class owner = Class::metadata;
};

struct TensorFields {
  enum : std::size_t { properties, size, chunks, count };
  static constexpr std::array<std::string_view, count> names = {"properties", "size", "chunks"};
  static constexpr Class owner = Class::tensor;
};

struct ObjectFields {
  enum : std::size_t { count };
  static constexpr std::array<std::string_view, count> names = {};
  static constexpr Class owner = Class::object;
};

struct ChunkFields {
  enum : std::size_t { offsets, sizes, count };
  static constexpr std::array<std::string_view, count> names = {"offsets", "sizes"};
  static constexpr Class owner = Class::chunk;
};

// TensorProperties is pickled as a tuple, in this order.
struct PropertiesFields {
  enum : std::size_t { dtype, layout, requires_grad, memory_format, pin_memory, count };
};

struct IndexFields {
  enum : std::size_t { fqn, index, offset, count };
  static constexpr std::array<std::string_view, count> names = {"fqn", "index", "offset"};
  static constexpr Class owner = Class::index;
};

struct StorageInfoFields {
  enum : std::size_t { relative_path, offset, length, transform_descriptors, count };
  static constexpr std::array<std::string_view, count> names = {"relative_path", "offset", "length",
                                                                "transform_descriptors"};
  static constexpr Class owner = Class::storage_info;
};

struct StorageMetaFields {
  enum : std::size_t { checkpoint_id, save_id, load_id, modules, count };
  static constexpr std::array<std::string_view, count> names = {"checkpoint_id", "save_id", "load_id", "modules"};
  static constexpr Class owner = Class::storage_meta;
};

}  // namespace tessera::dcp
