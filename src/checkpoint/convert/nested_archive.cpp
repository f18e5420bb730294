#include "checkpoint/convert/nested_archive.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/error.h"
#include "tessera/format/python_value.h"
#include "tessera/layout/byte_ranges.h"

namespace tessera::checkpoint {

PlannedUnit NestedArchivePlanner::plan(const std::vector<Leaf>& leaves, const std::string& stem) {
  Nested root;
  ExpansionBudget budget(stored_bytes(source_->checkpoint()->files()));
  for (std::size_t i = 0; i < leaves.size(); ++i) root.set(leaves[i].path, i, *leaves[i].name, budget, leaves[i].keys);
  if (root.kind == Nested::Kind::none) root.kind = Nested::Kind::dict;
  Building building;
  Bytes data_pkl;
  pickle::Writer writer(data_pkl, 2);
  write(writer, root, leaves, building);
  writer.stop();
  const auto layout =
      std::make_shared<const torch_archive::ArchiveLayout>(stem, std::move(data_pkl), building.storages);
  return {layout->total_bytes(), [layout, sources = std::move(building.sources), source = source_] {
            std::vector<Data> data;
            for (const StorageSource& from : sources) {
              data.push_back(from.tensor != SIZE_MAX ? source->tensor_data(from.tensor, from.box)
                                                     : source->raw_data(from.raw.file, from.raw.entry));
            }
            return archive_unit(layout, std::move(data));
          }};
}

void NestedArchivePlanner::write(pickle::Writer& writer, const Nested& node, const std::vector<Leaf>& leaves,
                                 Building& building) {
  switch (node.kind) {
    case Nested::Kind::none:
      writer.none();
      return;
    case Nested::Kind::leaf:
      if (leaves[node.leaf].is_tensor) {
        write_tensor(writer, leaves[node.leaf], building);
      } else {
        write_object(writer, leaves[node.leaf].number, building);
      }
      return;
    case Nested::Kind::dict:
      writer.empty_dict();
      if (node.children.empty()) return;
      writer.mark();
      for (std::size_t i = 0; i < node.children.size(); ++i) {
        write_key(writer, node.keys[i]);
        write(writer, *node.children[i], leaves, building);
      }
      writer.set_items();
      return;
    case Nested::Kind::list:
      writer.empty_list();
      writer.mark();
      for (const auto& child : node.children) {
        if (child) {
          write(writer, *child, leaves, building);
        } else {
          writer.none();
        }
      }
      writer.appends();
      return;
  }
}

void NestedArchivePlanner::write_key(pickle::Writer& writer, const Nested::DictKey& key) {
  if (!key.is_json) return writer.string(key.text);
  const auto [known, is_new] = keys_.try_emplace(key.text);
  if (is_new) known->second = pickle::from_lossless_json(nlohmann::ordered_json::parse(key.text), key_tree_);
  writer.value(known->second);
}

void NestedArchivePlanner::write_tensor(pickle::Writer& writer, const Leaf& leaf, Building& building) const {
  const OutputTensor& output = source_->tensors()[leaf.number];
  torch_archive::TensorRef tensor;
  tensor.dtype = output.dtype;
  tensor.sizes = leaf.box.sizes;
  tensor.strides = row_major_strides(tensor.sizes);
  tensor.storage = {storage_key(leaf, building), "cpu", output.dtype, volume(leaf.box) * dtype_size(output.dtype)};
  torch_archive::write_tensor(writer, tensor);
}

std::string NestedArchivePlanner::storage_key(const Leaf& leaf, Building& building) const {
  const OutputTensor& output = source_->tensors()[leaf.number];
  std::string key = std::to_string(building.storages.size());
  if (source_->checkpoint()->kind() == SourceKind::torch && volume(leaf.box) > 0 &&
      leaf.box == Box::full(output.info->shape) && !source_->checkpoint()->is_computed(output.source)) {
    const Extent extent = source_->checkpoint()->locate(output.source, 0);
    const auto [found, is_new] = building.tied.try_emplace({{extent.file, extent.offset_bytes},
                                                            extent.length_bytes,
                                                            extent.strides,
                                                            output.info->shape,
                                                            output.info->dtype},
                                                           key);
    if (!is_new) return found->second;
  }
  const auto bytes = static_cast<std::uint64_t>(volume(leaf.box) * dtype_size(output.dtype));
  building.storages.push_back({key, bytes});
  building.sources.push_back({leaf.number, leaf.box, {}});
  return key;
}

void NestedArchivePlanner::write_object(pickle::Writer& writer, std::size_t i, Building& building) {
  auto known = objects_.find(i);
  if (known == objects_.end()) {
    known = objects_.emplace(i, source_->checkpoint()->load_object(source_->objects()[i], ObjectUse::copy)).first;
  }
  const ObjectValue& value = known->second;
  writer.value(value.value, [&](pickle::Writer& out, pickle::NodeRef id) {
    std::optional<torch_archive::StorageRef> storage = torch_archive::as_storage(id);
    if (!storage) return false;
    const ObjectValue::Storage& raw = value.storages.at(storage->key);
    const auto [found, is_new] = building.raw_keys.try_emplace({raw.file, raw.entry.data_offset_bytes},
                                                               std::to_string(building.storages.size()));
    if (is_new) {
      building.storages.push_back({found->second, raw.entry.size_bytes});
      building.sources.push_back({SIZE_MAX, {}, raw});
    }
    storage->key = found->second;
    torch_archive::write_storage_id(out, *storage);
    return true;
  });
}

std::vector<NestedArchivePlanner::Leaf> leaves_of(const OutputSource& source) {
  std::vector<std::pair<std::size_t, NestedArchivePlanner::Leaf>> leaves;  // by position
  std::set<const PathKeys*> warned;
  const auto add = [&](const auto& info, bool is_tensor, std::size_t number, Box box) {
    NestedArchivePlanner::Leaf leaf{
        info.path.empty() ? Path{info.name} : info.path, &info.name, is_tensor, number, std::move(box), {}};
    if (info.keys) {
      leaf.keys = *info.keys;
      for (const PathKey& key : leaf.keys) {
        if (!key.json.empty() || !warned.insert(info.keys.get()).second) continue;
        source.warn(fmt::format("'{}': the key {} is of a type that is not understood, and becomes a str",
                                printable(info.name), printable(std::get<std::string>(info.path[key.part]))));
      }
    }
    leaves.emplace_back(info.position, std::move(leaf));
  };
  for (std::size_t i = 0; i < source.tensors().size(); ++i) {
    const TensorInfo& info = *source.tensors()[i].info;
    add(info, true, i, Box::full(info.shape));
  }
  for (std::size_t i = 0; i < source.objects().size(); ++i) {
    add(source.checkpoint()->objects()[source.objects()[i]], false, i, Box());
  }
  std::sort(leaves.begin(), leaves.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<NestedArchivePlanner::Leaf> sorted;
  sorted.reserve(leaves.size());
  for (auto& [position, leaf] : leaves) sorted.push_back(std::move(leaf));
  return sorted;
}

}  // namespace tessera::checkpoint
