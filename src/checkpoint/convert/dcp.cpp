// Plans a DCP directory: `.metadata` and files `__<rank>_<n>.distcp` with one torch.save archive per chunk and object.

#include <map>
#include <utility>

#include "checkpoint/convert/output_plan.h"
#include "checkpoint/save/item_layouts.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/internal/file_names.h"
#include "tessera/checkpoint/internal/shard_dim.h"
#include "tessera/format/dcp_metadata.h"
#include "tessera/layout/sharding.h"

namespace tessera::checkpoint {
namespace {

torch_archive::ArchiveLayout object_layout(const ObjectArchive& archive) {
  std::vector<torch_archive::ArchiveLayout::Storage> storages;
  for (std::size_t i = 0; i < archive.storages.size(); ++i) {
    storages.push_back({std::to_string(i), archive.storages[i].entry.size_bytes});
  }
  return {kItemPrefix, archive.data_pkl, storages};
}

std::shared_ptr<const torch_archive::ArchiveLayout> share(torch_archive::ArchiveLayout layout) {
  return std::make_shared<const torch_archive::ArchiveLayout>(std::move(layout));
}

// Builds files, their units and the metadata with the location of each.
class DcpPlanner {
 public:
  explicit DcpPlanner(std::shared_ptr<const OutputSource> source) : source_(std::move(source)) {}

  OutputPlan plan(const DcpLayout& layout) {
    const std::vector<OutputTensor>& tensors = source_->tensors();
    for (const OutputTensor& tensor : tensors) {
      const TensorInfo& info = *tensor.info;
      dcp::MetadataEntry entry;
      entry.name = info.name;
      entry.is_tensor = true;
      entry.properties.dtype = tensor.dtype;
      entry.properties.requires_grad = info.requires_grad;
      entry.shape = info.shape;
      entry.chunks = BoxList(info.shape.size());
      add_entry(std::move(entry), info.path);
    }
    for (const std::size_t i : source_->objects()) {
      dcp::MetadataEntry entry;
      entry.name = source_->checkpoint()->objects()[i].name;
      add_entry(std::move(entry), source_->checkpoint()->objects()[i].path);
    }
    start_rank(0);
    for (std::size_t i = 0; i < source_->objects().size(); ++i) add_object(i);
    for (const auto& [rank, pieces] : layout.ranks) {
      if (rank != 0) start_rank(rank);
      for (const DcpLayout::Piece& piece : pieces) add_chunk(piece);
    }
    keep_unknown_fields();
    metadata_.storage_meta = dcp::StorageMeta();
    plan_.small_files.emplace_back(kMetadataFileName, dcp::write(metadata_));
    return std::move(plan_);
  }

 private:
  void add_entry(dcp::MetadataEntry entry, const Path& path) {
    if (!metadata_.paths) metadata_.paths.emplace();
    Path& place = metadata_.paths->emplace_back(path.empty() ? Path{entry.name} : path);
    // PyTorch expects the root of a state dict to be a dict, even if a torch.save file has a list there.
    if (const auto* index = std::get_if<std::int64_t>(&place[0])) place[0] = std::to_string(*index);
    metadata_.entries.push_back(std::move(entry));
  }

  void start_rank(std::int64_t rank) {
    rank_ = rank;
    file_of_rank_ = 0;
    open_ = false;
  }

  // Appends `length_bytes` to the current file. Begins a new file for a new rank or if the size limit requires it.
  dcp::StoredItem place(std::uint64_t length_bytes) {
    const std::uint64_t limit = source_->options().max_shard_bytes;
    if (!open_ || (limit > 0 && offset_ > 0 && offset_ + length_bytes > limit)) {
      plan_.files.push_back({to_string(DataFileName{rank_, file_of_rank_++, 0}), 0, {}});
      metadata_.files.push_back(plan_.files.back().name);
      offset_ = 0;
      open_ = true;
    }
    dcp::StoredItem item;
    item.file = static_cast<std::uint32_t>(metadata_.files.size() - 1);
    item.offset_bytes = static_cast<std::int64_t>(offset_);
    item.length_bytes = static_cast<std::int64_t>(length_bytes);
    offset_ += length_bytes;
    return item;
  }

  void add_chunk(const DcpLayout::Piece& piece) {
    const DType dtype = source_->tensors()[piece.tensor].dtype;
    const std::uint64_t length = chunk_layout(dtype, piece.box.sizes).total_bytes();
    dcp::MetadataEntry& entry = metadata_.entries[piece.tensor];
    entry.chunks.push_back(piece.box);
    entry.items.push_back(place(length));
    ++plan_.files.back().tensors;
    plan_.files.back().units.push_back({length, [source = source_, piece, dtype] {
                                          std::vector<Data> data;
                                          data.push_back(source->tensor_data(piece.tensor, piece.box));
                                          return archive_unit(share(chunk_layout(dtype, piece.box.sizes)),
                                                              std::move(data));
                                        }});
  }

  void add_object(std::size_t i) {
    const std::size_t number = source_->objects()[i];
    const Checkpoint& checkpoint = *source_->checkpoint();
    const ObjectInfo& info = checkpoint.objects()[number];
    dcp::MetadataEntry& entry = metadata_.entries[source_->tensors().size() + i];
    const ObjectValue value = checkpoint.load_object(number, ObjectUse::copy);
    if (checkpoint.kind() == SourceKind::dcp) {
      // Copy the stored archive byte for byte.
      for (const auto& [key, storage] : value.storages) check_entry(*checkpoint.open_file(storage.file), storage.entry);
      const StoredRange stored = checkpoint.without_transforms(info.stored);
      entry.items.push_back(place(stored.length_bytes));
      plan_.files.back().units.push_back({stored.length_bytes, [source = source_, stored] {
                                            Unit unit;
                                            unit.segments.emplace_back(copy_of(source, stored));
                                            return unit;
                                          }});
      return;
    }
    const auto archive = std::make_shared<const ObjectArchive>(make_object_archive(value));
    const std::uint64_t length = object_layout(*archive).total_bytes();
    entry.items.push_back(place(length));
    plan_.files.back().units.push_back({length, [source = source_, archive] {
                                          std::vector<Data> data;
                                          for (const ObjectValue::Storage& storage : archive->storages) {
                                            data.push_back(source->raw_data(storage.file, storage.entry));
                                          }
                                          return archive_unit(share(object_layout(*archive)), std::move(data));
                                        }});
  }

  static Data copy_of(const std::shared_ptr<const OutputSource>& source, const StoredRange& stored) {
    Data data;
    data.length_bytes = stored.length_bytes;
    data.produce = [source, stored](std::uint64_t begin_bytes, MutableByteView out) {
      source->checkpoint()->open_file(stored.file)->read_at(stored.offset_bytes + begin_bytes, out);
    };
    return data;
  }

  void keep_unknown_fields() {
    const dcp::Metadata* original = source_->checkpoint()->dcp_metadata();
    if (original == nullptr) return;
    metadata_.extra = original->extra;
    metadata_.extra_tree = original->extra_tree;
  }

  std::shared_ptr<const OutputSource> source_;
  OutputPlan plan_;
  dcp::Metadata metadata_;
  std::int64_t rank_ = 0, file_of_rank_ = 0;
  bool open_ = false;
  std::uint64_t offset_ = 0;
};

// Scalars and tensors without elements have one chunk.
bool is_indivisible(const TensorInfo& tensor) { return tensor.shape.empty() || tensor.size_bytes() == 0; }

// Assigns each chunk to the rank in its file's name, or to a rank per file if the name has none.
void place_by_files(DcpLayout& layout, const Checkpoint& like, const TensorInfo& info, std::size_t tensor) {
  if (is_indivisible(info) || info.chunks.empty()) {
    layout.ranks[0].push_back({tensor, Box::full(info.shape)});
    return;
  }
  for (std::size_t c = 0; c < info.chunks.size(); ++c) {
    if (is_empty(info.chunks[c])) continue;
    std::int64_t rank = 0;
    if (info.stored[c].file != StoredRange::kNoFile) {
      rank = like.files()[info.stored[c].file].rank.value_or(info.stored[c].file);
    }
    layout.ranks[rank].push_back({tensor, Box(info.chunks[c])});
  }
}

}  // namespace

DcpLayout layout_of_source(const OutputSource& source) {
  DcpLayout layout;
  for (std::size_t i = 0; i < source.tensors().size(); ++i) {
    place_by_files(layout, *source.checkpoint(), *source.tensors()[i].info, i);
  }
  return layout;
}

DcpLayout layout_for_ranks(const OutputSource& source, const ReshardOptions& options) {
  DcpLayout layout;
  for (std::size_t i = 0; i < source.tensors().size(); ++i) {
    const TensorInfo& info = *source.tensors()[i].info;
    if (options.like) {
      const auto found = options.like->find_tensor(info.name);
      if (!found) {
        source.warn(fmt::format("'{}' is not in {}; storing it unsharded on rank 0", printable(info.name),
                                options.like->path().string()));
        layout.ranks[0].push_back({i, Box::full(info.shape)});
        continue;
      }
      const TensorInfo& like = options.like->tensors()[*found];
      if (like.shape != info.shape) {
        fail(ErrorCode::invalid_argument, "reshard: tensor '{}' has shape {}, expected {} as in {}",
             printable(info.name), shape_to_string(info.shape), shape_to_string(like.shape),
             options.like->path().string());
      }
      options.like->check_partition(*found);
      place_by_files(layout, *options.like, like, i);
      continue;
    }
    if (is_indivisible(info)) {
      layout.ranks[0].push_back({i, Box::full(info.shape)});
      continue;
    }
    const std::int64_t dim = dim_to_shard(static_cast<std::int64_t>(info.shape.size()), options.dim);
    const BoxList boxes = chunk_boxes(info.shape, dim, options.ranks);
    for (std::size_t r = 0; r < boxes.size(); ++r) {
      if (!is_empty(boxes[r])) layout.ranks[static_cast<std::int64_t>(r)].push_back({i, Box(boxes[r])});
    }
  }
  return layout;
}

OutputPlan plan_dcp(const std::shared_ptr<const OutputSource>& source, const DcpLayout& layout) {
  return DcpPlanner(source).plan(layout);
}

}  // namespace tessera::checkpoint
