// Plans one torch.save file with the nested state dict.

#include <algorithm>
#include <deque>
#include <map>
#include <tuple>
#include <utility>

#include "checkpoint/convert/nested.h"
#include "checkpoint/convert/output_plan.h"
#include "tessera/base/error.h"
#include "tessera/format/pickle_writer.h"
#include "tessera/layout/byte_ranges.h"

namespace tessera::checkpoint {
namespace {

class TorchPlanner {
 public:
  explicit TorchPlanner(std::shared_ptr<const OutputSource> source) : source_(std::move(source)) {}

  OutputPlan plan(const std::string& file_name) {
    const Checkpoint& checkpoint = *source_->checkpoint();
    const std::size_t tensors = source_->tensors().size();
    Nested root;
    struct Leaf {
      std::size_t position, number;
      const Path* path;
      const std::string* name;
    };
    std::vector<Leaf> leaves;  // sorted by position: a dict keeps the order in which its leaves are added
    for (std::size_t i = 0; i < tensors; ++i) {
      const TensorInfo& info = *source_->tensors()[i].info;
      leaves.push_back({info.position, i, &info.path, &info.name});
    }
    for (std::size_t i = 0; i < source_->objects().size(); ++i) {
      const ObjectInfo& info = checkpoint.objects()[source_->objects()[i]];
      leaves.push_back({info.position, tensors + i, &info.path, &info.name});
    }
    std::sort(leaves.begin(), leaves.end(), [](const Leaf& a, const Leaf& b) { return a.position < b.position; });
    ExpansionBudget budget(stored_bytes(checkpoint));
    for (const Leaf& leaf : leaves) {
      root.set(leaf.path->empty() ? Path{*leaf.name} : *leaf.path, leaf.number, *leaf.name, budget);
    }
    Bytes data_pkl;
    pickle::Writer writer(data_pkl, 2);
    if (root.kind == Nested::Kind::none) root.kind = Nested::Kind::dict;
    write(writer, root);
    writer.stop();

    const std::string stem = file_name.substr(0, file_name.find_last_of('.'));
    const auto layout = std::make_shared<const torch_archive::ArchiveLayout>(stem.empty() ? "archive" : stem,
                                                                             std::move(data_pkl), storages_);
    PlannedFile file{file_name, tensors, {}};
    file.units.push_back(
        {layout->total_bytes(), [layout, sources = std::move(sources_), source = source_] {
           std::vector<Data> data;
           for (const StorageSource& from : sources) {
             data.push_back(
                 from.tensor != SIZE_MAX
                     ? source->tensor_data(from.tensor, Box::full(source->tensors()[from.tensor].info->shape))
                     : source->raw_data(from.raw.file, from.raw.entry));
           }
           return archive_unit(layout, std::move(data));
         }});
    OutputPlan result;
    result.files.push_back(std::move(file));
    return result;
  }

 private:
  // The source of a storage's bytes: a tensor, or a storage that an object refers to.
  struct StorageSource {
    std::size_t tensor = SIZE_MAX;
    ObjectValue::Storage raw;
  };

  void write(pickle::Writer& writer, const Nested& node) {
    switch (node.kind) {
      case Nested::Kind::none:
        writer.none();
        return;
      case Nested::Kind::leaf:
        if (node.leaf < source_->tensors().size()) {
          write_tensor(writer, node.leaf);
        } else {
          write_object(writer, node.leaf - source_->tensors().size());
        }
        return;
      case Nested::Kind::dict:
        writer.empty_dict();
        if (node.children.empty()) return;
        writer.mark();
        for (std::size_t i = 0; i < node.children.size(); ++i) {
          writer.string(node.keys[i]);
          write(writer, *node.children[i]);
        }
        writer.set_items();
        return;
      case Nested::Kind::list:
        writer.empty_list();
        writer.mark();
        for (const auto& child : node.children) {
          if (child) {
            write(writer, *child);
          } else {
            writer.none();
          }
        }
        writer.appends();
        return;
    }
  }

  void write_tensor(pickle::Writer& writer, std::size_t i) {
    const OutputTensor& output = source_->tensors()[i];
    torch_archive::TensorRef tensor;
    tensor.dtype = output.dtype;
    tensor.sizes = output.info->shape;
    tensor.strides = row_major_strides(tensor.sizes);
    const std::int64_t count = volume(Box::full(tensor.sizes));
    tensor.storage = {storage_key(i), "cpu", output.dtype, count * dtype_size(output.dtype)};
    torch_archive::write_tensor(writer, tensor);
  }

  // Returns the key of a tensor's storage. Tensors that share memory in the source (tied weights) share a storage.
  std::string storage_key(std::size_t i) {
    const OutputTensor& output = source_->tensors()[i];
    std::string key = std::to_string(storages_.size());
    if (source_->checkpoint()->kind() == SourceKind::torch && output.info->size_bytes() > 0) {
      const Extent extent = source_->checkpoint()->locate(output.source, 0);
      const auto [found, is_new] = tied_.try_emplace(
          {extent.offset_bytes, extent.length_bytes, extent.strides, output.info->shape, output.info->dtype}, key);
      if (!is_new) return found->second;
    }
    const auto bytes = static_cast<std::uint64_t>(volume(Box::full(output.info->shape)) * dtype_size(output.dtype));
    storages_.push_back({key, bytes});
    sources_.push_back({i, {}});
    return key;
  }

  void write_object(pickle::Writer& writer, std::size_t i) {
    const ObjectValue& value = objects_.emplace_back(source_->checkpoint()->load_object(source_->objects()[i]));
    writer.value(value.value, [&](pickle::Writer& out, pickle::NodeRef id) {
      std::optional<torch_archive::StorageRef> storage = torch_archive::as_storage(id);
      if (!storage) return false;
      const ObjectValue::Storage& raw = value.storages.at(storage->key);
      const auto [found, is_new] =
          raw_keys_.try_emplace({raw.file, raw.entry.data_offset_bytes}, std::to_string(storages_.size()));
      if (is_new) {
        storages_.push_back({found->second, raw.entry.size_bytes});
        sources_.push_back({SIZE_MAX, raw});
      }
      storage->key = found->second;
      torch_archive::write_storage_id(out, *storage);
      return true;
    });
  }

  std::shared_ptr<const OutputSource> source_;
  std::deque<ObjectValue> objects_;  // kept alive because the writer memoizes values by address
  std::vector<torch_archive::ArchiveLayout::Storage> storages_;
  std::vector<StorageSource> sources_;
  std::map<std::tuple<std::uint64_t, std::uint64_t, std::vector<std::int64_t>, std::vector<std::int64_t>, DType>,
           std::string>
      tied_;
  std::map<std::pair<std::uint32_t, std::uint64_t>, std::string> raw_keys_;
};

}  // namespace

OutputPlan plan_torch(const std::shared_ptr<const OutputSource>& source, const std::string& file_name) {
  return TorchPlanner(source).plan(file_name);
}

}  // namespace tessera::checkpoint
