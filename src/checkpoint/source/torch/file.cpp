// Reads one torch.save file. Nested containers are flattened to names.

#include <unordered_set>
#include <utility>

#include "checkpoint/source/expansion.h"
#include "checkpoint/source/source.h"
#include "checkpoint/source/torch/flatten.h"
#include "tessera/base/error.h"
#include "tessera/format/python_value.h"
#include "tessera/layout/byte_ranges.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;
using pickle::Kind;
using pickle::NodeRef;
namespace {

constexpr std::size_t kMaxObjectDepth = 200;
constexpr std::size_t kShownIdBytes = 100;

void collect_persistent_ids(NodeRef value, std::vector<NodeRef>& found, std::unordered_set<std::uint64_t>& seen,
                            std::size_t depth) {
  if (depth > kMaxObjectDepth) {
    fail(ErrorCode::unsupported, "an object is nested deeper than {0} levels, expected at most {0}", kMaxObjectDepth);
  }
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
      for (const NodeRef call : object.setter_calls()) visit(call);
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

class TorchSource final : public SourceBackend {
 public:
  // Reads file `name` of `storage`. `file_path` is for messages. `budgets` are those of the checkpoint that it is a
  // part of; null if it is one.
  TorchSource(const fs::path& file_path, std::shared_ptr<const Storage> storage_in, const std::string& name,
              std::optional<Sidecar> sidecar, const OpenOptions& options, StateBudgets* budgets)
      : SourceBackend(file_path, std::move(storage_in), std::move(sidecar)) {
    kind = SourceKind::torch;
    const std::uint32_t number = add_file(name);
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
    StateBudgets own(file->size_bytes());
    const NodeRef root = archive_->tree.root();
    StateFlattener flattener(path.string(), (budgets != nullptr ? *budgets : own).leaves,
                             StateFlattener::Tuples::are_leaves);
    const auto take = [&](NodeRef value, const LeafPlace& at) { leaf(value, at, flattener); };
    if (flattener.is_container(root)) {
      flattener.flatten(root, {}, take);
    } else {
      take(root, {{torch_archive::is_tensor_like(root) ? "tensor" : "object"}});
    }
    // Whatever walks through a value has limits for it alone. So a file of one object, which may be large, is not
    // walked through here.
    if (budgets != nullptr || objects.size() > 1) charge_objects((budgets != nullptr ? *budgets : own).objects);
  }

  Extent locate(std::size_t tensor, std::size_t) const override { return extents_[tensor]; }

  ObjectValue load_object(std::size_t i) const override {
    ObjectValue result;
    result.value = object_values_[i];
    result.storages =
        with_context([&] { return fmt::format("{}: object '{}'", path.string(), printable(objects[i].name)); },
                     [&] { return storages_of(result.value, *archive_, 0); });
    result.tree = std::shared_ptr<const pickle::Tree>(archive_, &archive_->tree);
    return result;
  }

 private:
  void charge_objects(ExpansionBudget& budget) const {
    pickle::RepeatedParts parts;
    for (std::size_t i = 0; i < objects.size(); ++i) {
      with_context([&] { return fmt::format("{}: '{}'", path.string(), printable(objects[i].name)); },
                   [&] { charge_shared(budget, parts, object_values_[i]); });
    }
  }

  void leaf(NodeRef value, const LeafPlace& at, StateFlattener& flattener) {
    const std::string name = name_of_path(at.path);
    const std::optional<torch_archive::TensorRef> found =
        with_context([&] { return fmt::format("{}: '{}'", path.string(), printable(name)); },
                     [&] { return torch_archive::as_tensor(value); });
    if (!found) {
      objects.push_back({name, {}, at.path, tensors.size() + objects.size(), at.keys});
      object_values_.push_back(value);
      return;
    }
    flattener.charge_tensor(found->sizes.size());
    TensorInfo info;
    info.name = name;
    info.dtype = found->dtype;
    info.requires_grad = found->requires_grad;
    info.shape = found->sizes;
    info.chunks = BoxList(info.shape.size());
    info.chunks.push_back(Box::full(info.shape));
    info.path = at.path;
    info.keys = at.keys;
    info.position = tensors.size() + objects.size();
    Extent extent = extent_of(*found, archive_->storage_entry(found->storage), 0);
    info.stored.push_back({0, extent.offset_bytes, extent.length_bytes});
    tensors.push_back(std::move(info));
    extents_.push_back(std::move(extent));
  }

  std::shared_ptr<torch_archive::Archive> archive_;
  std::vector<Extent> extents_;
  std::vector<NodeRef> object_values_;
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
    if (!storage) {
      fail(ErrorCode::unsupported, "found the persistent id {}, expected one that names a storage",
           printable(pickle::repr(id, kShownIdBytes)));
    }
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
  return std::make_unique<TorchSource>(file, file_system_storage(file.parent_path()), file.filename().string(),
                                       sidecar_of(file, options), options, nullptr);
}

std::unique_ptr<SourceBackend> open_torch_file(const std::shared_ptr<const Storage>& storage, const std::string& name,
                                               const OpenOptions& options, StateBudgets& budgets) {
  return std::make_unique<TorchSource>(fs::path(storage->name_of(name)), storage, name, sidecar_of(*storage, options),
                                       options, &budgets);
}

}  // namespace tessera::checkpoint
