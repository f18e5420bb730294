#include <utility>

#include "format/json/events.h"
#include "tessera/base/error.h"
#include "tessera/format/pickle_writer.h"
#include "tessera/format/torch_checkpointing.h"
#include "tessera/layout/byte_ranges.h"

namespace tessera::torch_checkpointing {
namespace {

std::string json_of(const Path& path) {
  std::string json = "[";
  std::string_view separator;
  for (const Key& part : path) {
    json += std::exchange(separator, ",");
    const auto* key = std::get_if<std::string>(&part);
    json += key == nullptr ? std::to_string(std::get<std::int64_t>(part))
                           : json::quote(*key, "torch_checkpointing: key", true);
  }
  return json + "]";
}

class MetadataWriter {
 public:
  explicit MetadataWriter(Bytes& out) : out_(out, 4) {}

  void write(const CheckpointMetadata& metadata) {
    out_.empty_dict();
    out_.mark();
    key("metadata");
    out_.empty_dict();
    out_.mark();
    for (const Item& item : metadata.items) {
      out_.string(item.key);
      write_item(item, metadata.ranks);
    }
    out_.set_items();
    key("world_size");
    out_.integer(metadata.ranks);
    key("version");
    out_.string("2.0");
    out_.set_items();
    out_.stop();
  }

 private:
  void key(std::string_view name) { out_.interned_string(name); }

  void write_item(const Item& item, std::int64_t ranks) {
    out_.empty_dict();
    out_.mark();
    key("nested_path_to_metadata");
    out_.empty_dict();
    out_.mark();
    for (const TensorEntry& entry : item.entries) {
      out_.string(json_of(entry.path));
      out_.empty_list();
      out_.mark();
      for (const Group& group : entry.groups) write_group(group);
      out_.appends();
    }
    out_.set_items();
    key("rank_to_layout_info");
    out_.empty_dict();
    out_.mark();
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      out_.integer(rank);
      const auto file = item.files.find(rank);
      if (file == item.files.end()) {
        out_.none();
      } else {
        write_file(file->second);
      }
    }
    out_.set_items();
    out_.set_items();
  }

  void write_file(const FileLayout& file) {
    out_.empty_dict();
    out_.mark();
    key("file_path");
    out_.string(file.file);
    key("serialization_format");
    out_.empty_dict();
    out_.mark();
    key("type");
    key(file.serialization == Serialization::torch ? "TorchSerialization" : "SafetensorsSerialization");
    out_.set_items();
    out_.set_items();
  }

  void write_group(const Group& group) {
    out_.empty_dict();
    out_.mark();
    key("sharding_metadata");
    out_.empty_dict();
    out_.mark();
    key("type");
    key("DTensorShardingMetadata");
    key("data");
    out_.empty_dict();
    out_.mark();
    key("global_shape");
    integers(group.shape);
    key("dtype");
    key("torch." + std::string(dtype_name(group.dtype)));
    key("stride");
    integers(row_major_strides(group.shape));
    key("mesh_spec");
    write_mesh(group.mesh);
    key("placements");
    out_.empty_list();
    out_.mark();
    for (const Placement& placement : group.placements) write_placement(placement);
    out_.appends();
    out_.set_items();
    out_.set_items();
    key("ranks");
    tuple(group.mesh->ranks);
    out_.set_items();
  }

  void write_mesh(const std::shared_ptr<const Mesh>& mesh) {
    if (const auto known = meshes_.find(mesh.get()); known != meshes_.end()) return out_.get(known->second);
    out_.empty_dict();
    meshes_[mesh.get()] = out_.memoize();
    out_.mark();
    key("device_type");
    out_.string(mesh->device_type);
    key("mesh_shape");
    tuple(mesh->shape);
    key("mesh_data");
    tuple(mesh->ranks);
    key("mesh_dim_names");
    if (mesh->dim_names.empty()) {
      out_.none();
    } else {
      out_.mark();
      for (const std::string& name : mesh->dim_names) out_.string(name);
      out_.tuple_from_mark();
    }
    out_.set_items();
  }

  void write_placement(const Placement& placement) {
    out_.empty_dict();
    out_.mark();
    key("type");
    if (placement.is_replicate()) {
      key("Replicate");
    } else {
      key(placement.is_strided() ? "StridedShard" : "Shard");
      key("dim");
      out_.integer(placement.dim());
      if (placement.is_strided()) {
        key("split_factor");
        out_.integer(placement.split_factor());
      }
    }
    out_.set_items();
  }

  void integers(const std::vector<std::int64_t>& values) {
    out_.empty_list();
    out_.mark();
    for (const std::int64_t value : values) out_.integer(value);
    out_.appends();
  }

  void tuple(const std::vector<std::int64_t>& values) {
    out_.mark();
    for (const std::int64_t value : values) out_.integer(value);
    out_.tuple_from_mark();
  }

  pickle::Writer out_;
  std::unordered_map<const Mesh*, std::uint32_t> meshes_;
};

}  // namespace

Bytes write(const CheckpointMetadata& metadata) {
  Bytes bytes;
  MetadataWriter(bytes).write(metadata);
  return bytes;
}

std::string to_string(const FileName& name) { return fmt::format("{}_{}.pt", name.item, name.rank); }

bool is_item_key(std::string_view key) {
  return !key.empty() && key.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-") ==
                             std::string_view::npos;
}

std::optional<FileName> parse_file_name(std::string_view name) {
  constexpr std::string_view kEnding = ".pt";
  constexpr std::size_t kMaxDigits = 9;
  if (!name.ends_with(kEnding)) return std::nullopt;
  name.remove_suffix(kEnding.size());
  const std::size_t at = name.rfind('_');
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view digits = name.substr(at + 1);
  if (digits.empty() || digits.size() > kMaxDigits ||
      digits.find_first_not_of("0123456789") != std::string_view::npos || (digits.size() > 1 && digits[0] == '0') ||
      !is_item_key(name.substr(0, at))) {
    return std::nullopt;
  }
  return FileName{std::string(name.substr(0, at)), std::stoll(std::string(digits))};
}

}  // namespace tessera::torch_checkpointing
