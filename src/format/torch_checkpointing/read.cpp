#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "tessera/base/checked.h"
#include "tessera/base/error.h"
#include "tessera/format/internal/json_path.h"
#include "tessera/format/pickle_reader.h"
#include "tessera/format/python_value.h"
#include "tessera/format/torch_checkpointing.h"
#include "tessera/layout/mesh_layout.h"

namespace tessera::torch_checkpointing {
namespace {

using pickle::Kind;
using pickle::NodeRef;

class MetadataReader {
 public:
  MetadataReader(std::string name, std::uint64_t pickle_bytes)
      : name_(std::move(name)), limit_bytes_(std::max(kLeastBytes, kTimesPickle * pickle_bytes)) {}

  CheckpointMetadata read(NodeRef root) {
    CheckpointMetadata metadata;
    if (!root.is(Kind::dict)) {
      fail(ErrorCode::corrupt, "{}: found a {}, expected a dict with the keys metadata, world_size and version", name_,
           kind_name(root.kind()));
    }
    const std::optional<NodeRef> version = root.find("version");
    metadata.version = version ? text(*version, "version") : "1.0";
    if (metadata.version != "1.0" && metadata.version != "2.0") {
      fail(ErrorCode::unsupported, "{}: metadata of version {}, expected 1.0 or 2.0", name_,
           printable(metadata.version));
    }
    metadata.ranks = integer(member(root, "world_size", "metadata"), "world_size");
    if (metadata.ranks < 1 || metadata.ranks > kMaxRanks) {
      fail(ErrorCode::corrupt, "{}: world_size is {}, expected 1 to {}", name_, metadata.ranks, kMaxRanks);
    }
    ranks_ = metadata.ranks;
    if (metadata.version == "2.0") {
      for (const pickle::Pair& pair : dict(member(root, "metadata", "metadata"), "metadata")) {
        add_item(metadata, text(pair.key, "the key of an item"), pair.value);
      }
    } else {
      add_flat_items(metadata, member(root, "metadata", "metadata"),
                     member(root, "rank_to_layout_info_mappings", "metadata"));
    }
    return metadata;
  }

 private:
  // A pickle can define a value once and refer to it often. Law: whatever is copied of one, and each search of a dict,
  // is charged first.
  static constexpr std::uint64_t kLeastBytes = std::uint64_t{64} << 20, kTimesPickle = 16;
  static constexpr std::uint64_t kBytesPerRank = 64;  // of a mesh: in a list and in a hash map
  void charge(std::uint64_t bytes) const {
    made_bytes_ += bytes;
    if (made_bytes_ <= limit_bytes_) return;
    fail(ErrorCode::corrupt,
         "{}: it describes more than {}, expected at most 64 MiB or 16 times the file; it repeats the same dicts "
         "or lists many times",
         name_, format_bytes(limit_bytes_));
  }

  template <typename F>
  auto in_context(const std::string& what, F&& f) const {
    return with_context([&] { return fmt::format("{}: {}", name_, what); }, std::forward<F>(f));
  }

  // --- values of a kind

  NodeRef member(NodeRef value, std::string_view key, std::string_view what) const {
    if (!value.is(Kind::dict))
      fail(ErrorCode::corrupt, "{}: {} is a {}, expected a dict", name_, what, kind_name(value.kind()));
    charge(value.pairs().size());
    const std::optional<NodeRef> found = value.find(key);
    if (!found) fail(ErrorCode::corrupt, "{}: {} has no '{}', expected that key", name_, what, key);
    return *found;
  }

  std::span<const pickle::Pair> dict(NodeRef value, std::string_view what) const {
    if (!value.is(Kind::dict))
      fail(ErrorCode::corrupt, "{}: {} is a {}, expected a dict", name_, what, kind_name(value.kind()));
    return value.pairs();
  }

  std::span<const NodeRef> list(NodeRef value, std::string_view what) const {
    if (!value.is(Kind::list) && !value.is(Kind::tuple)) {
      fail(ErrorCode::corrupt, "{}: {} is a {}, expected a list or a tuple", name_, what, kind_name(value.kind()));
    }
    return value.items();
  }

  std::string text(NodeRef value, std::string_view what) const {
    if (!value.is(Kind::string))
      fail(ErrorCode::corrupt, "{}: {} is a {}, expected a string", name_, what, kind_name(value.kind()));
    charge(value.string().size());
    return std::string(value.string());
  }

  std::int64_t integer(NodeRef value, std::string_view what) const {
    if (!value.is(Kind::integer))
      fail(ErrorCode::corrupt, "{}: {} is a {}, expected an int", name_, what, kind_name(value.kind()));
    return value.integer();
  }

  std::vector<std::int64_t> sizes(NodeRef value, std::string_view what) const {
    std::vector<std::int64_t> result;
    charge(list(value, what).size() * sizeof result[0]);
    for (const NodeRef item : list(value, what)) {
      result.push_back(integer(item, what));
      if (result.back() < 0) fail(ErrorCode::corrupt, "{}: {} has {}, expected 0 or more", name_, what, result.back());
    }
    return result;
  }

  std::int64_t rank(NodeRef value, std::string_view what) const {
    // Version 1.0 has ranks as strings.
    std::int64_t number = -1;
    if (value.is(Kind::string)) {
      const std::string_view digits = value.string();
      const bool is_number =
          !digits.empty() && digits.size() < 10 && digits.find_first_not_of("0123456789") == std::string_view::npos;
      if (is_number) number = std::stoll(std::string(digits));
    } else {
      number = integer(value, what);
    }
    if (number < 0 || number >= ranks_) {
      fail(ErrorCode::corrupt, "{}: {} has {}, expected a rank from 0 to {}", name_, what, pickle::repr(value, 100),
           ranks_ - 1);
    }
    return number;
  }

  // --- items

  void add_item(CheckpointMetadata& metadata, std::string key, NodeRef value) const {
    Item& item = begin_item(metadata, std::move(key));
    const std::string what = fmt::format("item '{}'", printable(item.key));
    for (const pickle::Pair& pair : dict(member(value, "nested_path_to_metadata", what), what)) {
      item.entries.push_back(entry(item.key, path(text(pair.key, what), what), pair.value));
    }
    std::set<std::int64_t> seen;
    for (const pickle::Pair& pair : dict(member(value, "rank_to_layout_info", what), what)) {
      charge(sizeof pair);
      const std::int64_t of = rank(pair.key, what + ": rank_to_layout_info");
      seen.insert(of);
      add_file(item, of, pair.value);
    }
    if (std::ssize(seen) != ranks_) {
      fail(ErrorCode::corrupt, "{}: {} has the layouts of {} ranks, expected {}", name_, what, seen.size(), ranks_);
    }
  }

  // Version 1.0: paths begin with the item's key, and the layouts of all items are in one dict.
  void add_flat_items(CheckpointMetadata& metadata, NodeRef entries, NodeRef layouts) const {
    std::map<std::string, std::size_t> numbers;
    for (const pickle::Pair& pair : dict(entries, "metadata")) {
      Path full = path(text(pair.key, "a path"), "metadata");
      if (full.empty() || !std::holds_alternative<std::string>(full[0])) {
        fail(ErrorCode::corrupt, "{}: the path {} has no item, expected its key first", name_,
             pickle::repr(pair.key, 100));
      }
      const std::string key = std::get<std::string>(full[0]);
      const auto [found, is_new] = numbers.try_emplace(key, metadata.items.size());
      if (is_new) begin_item(metadata, key);
      Item& item = metadata.items[found->second];
      item.entries.push_back(entry(key, Path(full.begin() + 1, full.end()), pair.value));
    }
    for (const pickle::Pair& of_rank : dict(layouts, "rank_to_layout_info_mappings")) {
      const std::int64_t number = rank(of_rank.key, "rank_to_layout_info_mappings");
      for (const pickle::Pair& pair : dict(of_rank.value, "rank_to_layout_info_mappings")) {
        charge(sizeof pair);
        const auto found = numbers.find(text(pair.key, "the key of an item"));
        if (found != numbers.end()) add_file(metadata.items[found->second], number, pair.value);
      }
    }
  }

  Item& begin_item(CheckpointMetadata& metadata, std::string key) const {
    if (!is_item_key(key)) {
      fail(ErrorCode::corrupt, "{}: an item is named '{}', expected letters, digits, '-' and '_'", name_,
           printable(key));
    }
    metadata.items.emplace_back();
    metadata.items.back().key = std::move(key);
    return metadata.items.back();
  }

  void add_file(Item& item, std::int64_t of, NodeRef layout) const {
    if (layout.is_none()) return;
    const std::string what = fmt::format("the layout of item '{}' on rank {}", printable(item.key), of);
    FileLayout file;
    file.file = text(member(layout, "file_path", what), what);
    charge(sizeof file);
    const std::string type = text(member(member(layout, "serialization_format", what), "type", what), what);
    if (type == "SafetensorsSerialization") {
      file.serialization = Serialization::safetensors;
    } else if (type != "TorchSerialization") {
      fail(ErrorCode::unsupported, "{}: {} is {}, expected TorchSerialization or SafetensorsSerialization", name_, what,
           printable(type));
    }
    item.files[of] = std::move(file);
  }

  Path path(const std::string& json_text, const std::string& what) const {
    charge(3 * json_text.size());  // JSON, the path and texts for messages
    const nlohmann::json parts = nlohmann::json::parse(json_text, nullptr, false);
    if (!parts.is_array()) {
      fail(ErrorCode::corrupt, "{}: {}: the path {} is not a JSON list, expected one such as [\"layers\", 0]", name_,
           what, printable(json_text));
    }
    Path result;
    charge(parts.size() * sizeof(Key));
    for (const nlohmann::json& each : parts) {
      std::optional<Key> part = json::path_part(each);
      if (!part) {
        fail(ErrorCode::corrupt, "{}: {}: the path {} has a part of type {}, expected {}", name_, what,
             printable(json_text), each.type_name(), json::kPathParts);
      }
      result.push_back(*std::move(part));
    }
    return result;
  }

  // --- sharding

  TensorEntry entry(const std::string& key, Path in_item, NodeRef groups) const {
    charge(sizeof(TensorEntry));
    TensorEntry result;
    result.path = std::move(in_item);
    std::string what = fmt::format("item '{}'", printable(key));
    for (const Key& part : result.path) {
      what += std::holds_alternative<std::string>(part) ? fmt::format("['{}']", printable(std::get<std::string>(part)))
                                                        : fmt::format("[{}]", std::get<std::int64_t>(part));
    }
    for (const NodeRef group : list(groups, what)) result.groups.push_back(read_group(group, what));
    if (result.groups.empty())
      fail(ErrorCode::corrupt, "{}: {} has no sharding metadata, expected one or more", name_, what);
    return result;
  }

  Group read_group(NodeRef value, const std::string& what) const {
    const NodeRef sharding = member(value, "sharding_metadata", what);
    const std::string type = text(member(sharding, "type", what), what);
    if (type != "DTensorShardingMetadata") {
      fail(ErrorCode::unsupported,
           "{}: {} is sharded as the class {} of the program that saved it describes, expected DTensorShardingMetadata",
           name_, what, printable(type));
    }
    const NodeRef data = member(sharding, "data", what);
    Group group;
    group.shape = sizes(member(data, "global_shape", what), what + ": global_shape");
    charge(sizeof group);
    const std::string dtype = text(member(data, "dtype", what), what);
    const std::optional<DType> known =
        dtype.starts_with("torch.") ? find_dtype(std::string_view(dtype).substr(6)) : std::nullopt;
    if (!known) {
      fail(ErrorCode::unsupported, "{}: {} has the unknown dtype {}, expected one of PyTorch such as torch.float32",
           name_, what, printable(dtype));
    }
    group.dtype = *known;
    in_context(what, [&] {
      checked_multiply(checked_numel(group.shape, "number of elements"), dtype_size(group.dtype), "size in bytes");
    });
    group.mesh = mesh(member(data, "mesh_spec", what), what);
    const std::span<const NodeRef> placements = list(member(data, "placements", what), what);
    charge(placements.size() * sizeof(Placement));
    for (const NodeRef placement : placements) group.placements.push_back(read_placement(placement, what));
    // Ranks that share a description are those of its mesh.
    const NodeRef ranks = member(value, "ranks", what);
    if (checked_ranks_.insert({ranks.identity(), group.mesh.get()}).second) {
      for (const NodeRef item : list(ranks, what + ": ranks")) {
        const std::int64_t number = rank(item, what + ": ranks");
        if (!group.mesh->places.contains(number)) {
          fail(ErrorCode::corrupt, "{}: {} is on rank {}, expected a rank of its mesh", name_, what, number);
        }
      }
    }
    if (list(ranks, what).size() != group.mesh->ranks.size()) {
      fail(ErrorCode::corrupt, "{}: {} is on {} ranks, expected the {} of its mesh", name_, what,
           list(ranks, what).size(), group.mesh->ranks.size());
    }
    try {
      group.placements = MeshLayout(group.shape, group.mesh->shape, group.placements).placements();
    } catch (const Error& error) {
      fail(ErrorCode::corrupt, "{}: {}: {}", name_, what, error.what());
    }
    return group;
  }

  Placement read_placement(NodeRef value, const std::string& what) const {
    const std::string type = text(member(value, "type", what), what);
    if (type == "Replicate") return Placement::replicate();
    const bool is_strided = type == "StridedShard";
    if (type != "Shard" && !is_strided) {
      fail(ErrorCode::unsupported, "{}: {} has the placement {}, expected Shard, StridedShard or Replicate", name_,
           what, printable(type));
    }
    const std::int64_t dim = integer(member(value, "dim", what), what + ": dim");
    if (!is_strided) return Placement::shard(dim);
    const std::int64_t factor = integer(member(value, "split_factor", what), what + ": split_factor");
    if (factor < 1) fail(ErrorCode::corrupt, "{}: {} has split_factor {}, expected 1 or more", name_, what, factor);
    return Placement::strided_shard(dim, factor);
  }

  // The tensors of a checkpoint share few meshes, and a pickle has each once.
  std::shared_ptr<const Mesh> mesh(NodeRef value, const std::string& what) const {
    if (const auto known = meshes_.find(value.identity()); known != meshes_.end()) return known->second;
    auto result = std::make_shared<Mesh>();
    result->device_type = text(member(value, "device_type", what), what);
    result->shape = sizes(member(value, "mesh_shape", what), what + ": mesh_shape");
    const std::int64_t count = in_context(what, [&] { return checked_numel(result->shape, "size of its mesh"); });
    const std::span<const NodeRef> ranks = list(member(value, "mesh_data", what), what + ": mesh_data");
    charge(ranks.size() * kBytesPerRank);
    for (const NodeRef item : ranks) {
      const std::int64_t number = rank(item, what + ": mesh_data");
      if (!result->places.emplace(number, std::ssize(result->ranks)).second) {
        fail(ErrorCode::corrupt, "{}: {} has rank {} twice in its mesh, expected each once", name_, what, number);
      }
      result->ranks.push_back(number);
    }
    if (count != std::ssize(result->ranks) || count == 0) {
      fail(ErrorCode::corrupt, "{}: {} has {} ranks in a mesh of shape {}, expected {}", name_, what,
           result->ranks.size(), shape_to_string(result->shape),
           count == 0 ? "a shape without 0" : std::to_string(count));
    }
    meshes_.emplace(value.identity(), result);
    return result;
  }

  std::string name_;
  std::uint64_t limit_bytes_;
  mutable std::uint64_t made_bytes_ = 0;
  std::int64_t ranks_ = 1;
  mutable std::unordered_map<std::uint64_t, std::shared_ptr<const Mesh>> meshes_;
  mutable std::set<std::pair<std::uint64_t, const Mesh*>> checked_ranks_;  // lists of ranks that were checked
};

}  // namespace

CheckpointMetadata read(const ByteSource& source) {
  const Bytes bytes = read_all(source);
  const pickle::ReadResult pickle = pickle::read(bytes, source.name());
  return MetadataReader(source.name(), bytes.size()).read(pickle.tree.root());
}

}  // namespace tessera::torch_checkpointing
