// Reads one torch.save file. Nested containers are flattened to names with the rules of PyTorch's DCP.
// PyTorch: torch/distributed/checkpoint/_traverse.py, _nested_dict.py.

#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "checkpoint/source/expansion.h"
#include "checkpoint/source/source.h"
#include "tessera/base/error.h"
#include "tessera/format/python_value.h"
#include "tessera/layout/byte_ranges.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;
using pickle::Kind;
using pickle::NodeRef;
namespace {

constexpr std::size_t kMaxStateDepth = 200;

void collect_persistent_ids(NodeRef value, std::vector<NodeRef>& found, std::unordered_set<std::uint64_t>& seen,
                            std::size_t depth) {
  if (depth > kMaxStateDepth) fail(ErrorCode::unsupported, "an object is nested deeper than {} levels", kMaxStateDepth);
  const auto visit = [&](NodeRef child) { collect_persistent_ids(child, found, seen, depth + 1); };
  switch (value.kind()) {
    case Kind::list:
    case Kind::tuple:
    case Kind::set:
    case Kind::frozen_set:
      if (!seen.insert(value.identity()).second) return;
      for (const NodeRef item : value.items()) visit(item);
      return;
    case Kind::dict:
      if (!seen.insert(value.identity()).second) return;
      for (const pickle::Pair& pair : value.pairs()) {
        visit(pair.key);
        visit(pair.value);
      }
      return;
    case Kind::object: {
      if (!seen.insert(value.identity()).second) return;
      const pickle::Object& object = value.object();
      visit(object.callable);
      visit(object.arguments);
      visit(object.keyword_arguments());
      if (object.has_state) visit(object.state);
      for (const NodeRef item : object.list_items()) visit(item);
      for (const pickle::Pair& pair : object.dict_items()) {
        visit(pair.key);
        visit(pair.value);
      }
      return;
    }
    case Kind::persistent_id:
      if (seen.insert(value.identity()).second) found.push_back(value.persistent_id());
      return;
    default:
      return;
  }
}

// Returns the key-value pairs of a value that is a Mapping in Python.
std::optional<std::span<const pickle::Pair>> as_mapping(NodeRef value) {
  if (value.is(Kind::dict)) return value.pairs();
  if (!value.is(Kind::object)) return std::nullopt;
  const pickle::Object& object = value.object();
  if (object.calls("collections", "OrderedDict") || object.calls("collections", "defaultdict")) {
    return object.dict_items();
  }
  return std::nullopt;
}

class TorchSource final : public SourceBackend {
 public:
  TorchSource(const fs::path& file_path, const OpenOptions& options)
      : SourceBackend(file_path, file_system_storage(file_path.parent_path()), sidecar_of(file_path, options)) {
    kind = SourceKind::torch;
    const std::uint32_t number = add_file(file_path.filename().string());
    const std::shared_ptr<const ByteSource> file = open_file(number);
    torch_archive::OpenLimits limits;
    limits.pickle_bytes = options.max_metadata_bytes;
    archive_ = std::make_shared<torch_archive::Archive>(torch_archive::open(*file, 0, file->size_bytes(), limits));
    version = "torch.save";
    if (const zip::Entry* entry = archive_->directory.find(archive_->prefix + "/version");
        entry != nullptr && entry->size_bytes > 0 && entry->size_bytes < 16) {
      Bytes text(entry->size_bytes);
      file->read_at(entry->data_offset_bytes, text);
      while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
      version += " " + printable(as_text(text));
    }
    budget_ = ExpansionBudget(file->size_bytes());
    const NodeRef root = archive_->tree.root();
    const bool is_container = as_mapping(root) || (root.is(Kind::list) && !is_terminal(root, 0));
    if (is_container) {
      flatten(root, {}, 0);
    } else {
      leaf(root, {torch_archive::is_tensor_like(root) ? "tensor" : "object"});
    }
  }

  Extent locate(std::size_t tensor, std::size_t) const override { return extents_[tensor]; }

  ObjectValue load_object(std::size_t i) const override {
    ObjectValue result;
    result.value = object_values_[i];
    result.storages = storages_of(result.value, *archive_, 0);
    result.tree = std::shared_ptr<const pickle::Tree>(archive_, &archive_->tree);
    return result;
  }

 private:
  static std::string name_of(const Path& path_in) {
    std::string name;
    for (std::size_t i = 0; i < path_in.size(); ++i) {
      if (i > 0) name += '.';
      if (const auto* key = std::get_if<std::string>(&path_in[i])) {
        name += *key;
      } else {
        name += std::to_string(std::get<std::int64_t>(path_in[i]));
      }
    }
    return name;
  }

  // Whether a value is not flattened: it is neither a mapping nor a list that contains a tensor or a mapping.
  bool is_terminal(NodeRef value, std::size_t depth) {
    if (depth > kMaxStateDepth)
      fail(ErrorCode::unsupported, "the state is nested deeper than {} levels", kMaxStateDepth);
    if (as_mapping(value)) return false;
    if (!value.is(Kind::list)) return true;
    const auto [known, is_new] = terminal_lists_.try_emplace(value.identity(), true);
    if (!is_new) return known->second;
    for (const NodeRef item : value.items()) {
      const bool leads_on = (as_mapping(item) || item.is(Kind::list)) && !is_terminal(item, depth + 1);
      if (leads_on || torch_archive::is_tensor_like(item)) return terminal_lists_[value.identity()] = false;
    }
    return true;
  }

  // A pickle can define a container once and refer to it often.
  void charge(const Path& at) {
    std::uint64_t bytes = sizeof(TensorInfo);
    for (const Key& item : at) {
      const auto* key = std::get_if<std::string>(&item);
      bytes += sizeof(item) + 2 * (key == nullptr ? 0 : key->size());
    }
    if (!budget_.charge(bytes)) {
      fail(ErrorCode::corrupt,
           "{}: the flattened state takes more than {}, expected at most 64 MiB or 16 times the file; it repeats the "
           "same containers many times",
           path.string(), format_bytes(budget_.limit_bytes()));
    }
  }

  void flatten(NodeRef value, const Path& at, std::size_t depth) {
    charge(at);
    if (depth > kMaxStateDepth) {
      fail(ErrorCode::unsupported, "{}: the state is nested deeper than {} levels", path.string(), kMaxStateDepth);
    }
    if (const auto pairs = as_mapping(value)) {
      // An empty mapping has no leaves. Keep it as an object, so that it is not lost.
      if (pairs->empty() && depth > 0) return leaf(value, at);
      for (const pickle::Pair& pair : *pairs) {
        Path next = at;
        next.emplace_back(pair.key.is(Kind::string) ? std::string(pair.key.string()) : pickle::repr(pair.key, 1000));
        flatten(pair.value, next, depth + 1);
      }
    } else if (value.is(Kind::list) && !is_terminal(value, 0)) {
      const auto items = value.items();
      for (std::size_t i = 0; i < items.size(); ++i) {
        Path next = at;
        next.emplace_back(static_cast<std::int64_t>(i));
        flatten(items[i], next, depth + 1);
      }
    } else {
      leaf(value, at);
    }
  }

  void leaf(NodeRef value, const Path& at) {
    const std::string name = name_of(at);
    const std::optional<torch_archive::TensorRef> found =
        with_context([&] { return fmt::format("{}: '{}'", path.string(), printable(name)); },
                     [&] { return torch_archive::as_tensor(value); });
    if (!found) {
      objects.push_back({name, {}, at, tensors.size() + objects.size()});
      object_values_.push_back(value);
      return;
    }
    TensorInfo info;
    info.name = name;
    info.dtype = found->dtype;
    info.requires_grad = found->requires_grad;
    info.shape = found->sizes;
    info.chunks = BoxList(info.shape.size());
    info.chunks.push_back(Box::full(info.shape));
    info.path = at;
    info.position = tensors.size() + objects.size();
    Extent extent = extent_of(*found, archive_->storage_entry(found->storage), 0);
    info.stored.push_back({0, extent.offset_bytes, extent.length_bytes});
    tensors.push_back(std::move(info));
    extents_.push_back(std::move(extent));
  }

  std::shared_ptr<torch_archive::Archive> archive_;
  std::vector<Extent> extents_;
  std::vector<NodeRef> object_values_;
  std::unordered_map<std::uint64_t, bool> terminal_lists_;
  ExpansionBudget budget_{0};
};

}  // namespace

std::map<std::string, ObjectValue::Storage> storages_of(NodeRef value, const torch_archive::Archive& archive,
                                                        std::uint32_t file) {
  std::vector<NodeRef> ids;
  std::unordered_set<std::uint64_t> seen;
  collect_persistent_ids(value, ids, seen, 0);
  std::map<std::string, ObjectValue::Storage> storages;
  for (const NodeRef id : ids) {
    const std::optional<torch_archive::StorageRef> storage = torch_archive::as_storage(id);
    if (!storage) fail(ErrorCode::unsupported, "{}: found a persistent id that does not name a storage", archive.name);
    storages.try_emplace(storage->key, ObjectValue::Storage{file, archive.storage_entry(*storage)});
  }
  return storages;
}

Extent extent_of(const torch_archive::TensorRef& tensor, const zip::Entry& storage, std::uint32_t file) {
  Extent extent;
  extent.file = file;
  const std::int64_t size = dtype_size(tensor.dtype);
  extent.offset_bytes = storage.data_offset_bytes + static_cast<std::uint64_t>(tensor.storage_offset * size);
  bool empty = false, row_major = true;
  std::int64_t last = 0;
  const std::vector<std::int64_t> expected = row_major_strides(tensor.sizes);
  for (const std::int64_t dim_size : tensor.sizes) empty = empty || dim_size == 0;
  for (std::size_t d = 0; d < tensor.sizes.size() && !empty; ++d) {
    last += (tensor.sizes[d] - 1) * tensor.strides[d];
    row_major = row_major && (tensor.sizes[d] <= 1 || tensor.strides[d] == expected[d]);
  }
  extent.length_bytes = empty ? 0 : static_cast<std::uint64_t>((last + 1) * size);
  if (!row_major && !empty) extent.strides = tensor.strides;
  extent.checksum = Extent::Checksum{storage.data_offset_bytes, storage.size_bytes, storage.crc32};
  return extent;
}

std::unique_ptr<SourceBackend> open_torch_file(const fs::path& file, const OpenOptions& options) {
  return std::make_unique<TorchSource>(file, options);
}

}  // namespace tessera::checkpoint
