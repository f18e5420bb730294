// Reads a directory of torch.save files with an index, as the HuggingFace tools write it: each tensor is in one file.

#include <utility>

#include "checkpoint/source/expansion.h"
#include "checkpoint/source/shard_index.h"
#include "checkpoint/source/source.h"
#include "tessera/base/error.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;
namespace {

class TorchShardsSource final : public SourceBackend {
 public:
  TorchShardsSource(const std::shared_ptr<const Storage>& storage_in, const OpenOptions& options,
                    const std::string& index_name)
      : SourceBackend(storage_in->name(), storage_in, sidecar_of(*storage_in, options)) {
    kind = SourceKind::torch;
    const ShardIndex index(*this, index_name);
    OpenOptions of_file = options;
    of_file.sidecar = std::make_shared<const Sidecar>(sidecar_of(*storage_in, options).value_or(Sidecar()));
    std::uint64_t stored_bytes = 0;
    for (const std::string& name : index.files()) stored_bytes += files[add_file(name)].size_bytes.value_or(0);
    StateBudgets budgets(stored_bytes);
    std::uint32_t number = 0;
    for (const std::string& name : index.files()) take_file(name, number++, of_file, budgets);
    index.check();
    version = parts_.empty() ? "torch.save" : parts_[0].source->version;
  }

  Extent locate(std::size_t tensor, std::size_t chunk) const override {
    const auto [part, number] = tensors_of_[tensor];
    Extent extent = parts_[part].source->locate(number, chunk);
    extent.file = parts_[part].file;
    return extent;
  }

  ObjectValue load_object(std::size_t i) const override {
    const auto [part, number] = objects_of_[i];
    ObjectValue value = parts_[part].source->load_object(number);
    for (auto& [key, stored] : value.storages) stored.file = parts_[part].file;
    return value;
  }

 private:
  struct Part {
    std::unique_ptr<SourceBackend> source;
    std::uint32_t file;  // its file among those of this source
  };
  using Place = std::pair<std::size_t, std::size_t>;  // part, index in it

  void take_file(const std::string& name, std::uint32_t file, const OpenOptions& options, StateBudgets& budgets) {
    std::unique_ptr<SourceBackend> part = open_torch_file(storage, name, options, budgets);
    for (std::size_t i = 0; i < part->tensors.size(); ++i) {
      TensorInfo info = part->tensors[i];
      info.position = tensors.size() + objects.size();
      for (StoredRange& stored : info.stored) stored.file = file;
      tensors.push_back(std::move(info));
      tensors_of_.emplace_back(parts_.size(), i);
    }
    for (std::size_t i = 0; i < part->objects.size(); ++i) {
      ObjectInfo info = part->objects[i];
      info.position = tensors.size() + objects.size();
      objects.push_back(std::move(info));
      objects_of_.emplace_back(parts_.size(), i);
    }
    parts_.push_back({std::move(part), file});
  }

  std::vector<Part> parts_;
  std::vector<Place> tensors_of_, objects_of_;
};

}  // namespace

std::unique_ptr<SourceBackend> open_torch_directory(const std::shared_ptr<const Storage>& storage,
                                                    const OpenOptions& options, const std::string& index) {
  return std::make_unique<TorchShardsSource>(storage, options, index);
}

}  // namespace tessera::checkpoint
