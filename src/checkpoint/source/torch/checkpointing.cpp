// Reads a directory of torch_checkpointing: for each item, a file of each rank, and `metadata.pkl`, which states how
// the tensors of items with a resharder are sharded. See docs/formats/torch_checkpointing.md.
//
// A value that ranks share is that of the lowest rank, as for the package's own loader. Values that differ between
// ranks are all part of the state, each with a name of its own.

#include <algorithm>
#include <set>
#include <utility>

#include "checkpoint/source/expansion.h"
#include "checkpoint/source/source.h"
#include "checkpoint/source/torch/flatten.h"
#include "tessera/base/checked.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/checkpoint/manage/run_directory.h"
#include "tessera/format/safetensors.h"
#include "tessera/format/torch_checkpointing.h"
#include "tessera/layout/byte_ranges.h"
#include "tessera/layout/coverage.h"
#include "tessera/layout/mesh_layout.h"

namespace tessera::checkpoint {
namespace tc = torch_checkpointing;
namespace {

// A tensor as one rank saved it.
struct SavedTensor {
  DType dtype = DType::float32;
  bool requires_grad = false;
  std::vector<std::int64_t> sizes, strides;
  std::uint32_t file = 0;
  std::uint64_t offset_bytes = 0;  // of the first element
  std::optional<Extent::Checksum> checksum;

  // The location of the elements of `box`, which begins at `box.local_offsets` in this tensor.
  Extent extent(const LocalBox& box) const {
    const std::int64_t size = dtype_size(dtype);
    std::int64_t first = 0, last = 0;
    bool row_major = true;
    const std::vector<std::int64_t> expected = row_major_strides(box.box.sizes);
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      first += box.local_offsets[d] * strides[d];
      last += (box.box.sizes[d] - 1) * strides[d];
      row_major = row_major && (box.box.sizes[d] <= 1 || strides[d] == expected[d]);
    }
    Extent result;
    result.file = file;
    result.offset_bytes = offset_bytes + static_cast<std::uint64_t>(first * size);
    result.length_bytes = static_cast<std::uint64_t>((last + 1) * size);
    if (!row_major) result.strides = strides;
    result.checksum = checksum;
    return result;
  }

  // Whether the bytes are the same, as far as the checksums of the files can tell.
  bool same_as(const SavedTensor& other) const {
    return dtype == other.dtype && sizes == other.sizes && strides == other.strides && checksum && other.checksum &&
           checksum->crc32 == other.checksum->crc32 && checksum->length_bytes == other.checksum->length_bytes &&
           offset_bytes - checksum->offset_bytes == other.offset_bytes - other.checksum->offset_bytes;
  }
};

// How a tensor is sharded, and which part a rank has.
struct Part {
  std::vector<std::int64_t> shape;
  LocalShape local;
  std::vector<LocalBox> boxes;
};

// A leaf of an item as one rank saved it: a tensor or an object.
struct SavedLeaf {
  std::int64_t rank = 0;
  std::uint32_t file = 0;
  std::optional<SavedTensor> tensor;
  std::optional<Part> part;  // of a tensor that is distributed
  ObjectValue object;
};

struct Leaf {
  LeafPlace place;
  std::vector<SavedLeaf> saved;             // in order of ranks
  const tc::TensorEntry* listed = nullptr;  // in metadata.pkl
};

bool same_objects(const ObjectValue& a, const ObjectValue& b) {
  if (!pickle::equal(a.value, b.value) || a.storages.size() != b.storages.size()) return false;
  return std::equal(a.storages.begin(), a.storages.end(), b.storages.begin(), [](const auto& x, const auto& y) {
    return x.first == y.first && x.second.entry.crc32 == y.second.entry.crc32 &&
           x.second.entry.size_bytes == y.second.entry.size_bytes;
  });
}

bool same_leaves(const SavedLeaf& a, const SavedLeaf& b) {
  if (a.tensor.has_value() != b.tensor.has_value()) return false;
  return a.tensor ? a.tensor->same_as(*b.tensor) : same_objects(a.object, b.object);
}

class TorchCheckpointingSource final : public SourceBackend {
 public:
  TorchCheckpointingSource(const std::shared_ptr<const Storage>& storage_in, const OpenOptions& options)
      : SourceBackend(storage_in->name(), storage_in, sidecar_of(*storage_in, options)),
        max_pickle_bytes_(options.max_metadata_bytes) {
    kind = SourceKind::torch_checkpointing;
    const bool has_metadata = storage->size_bytes(std::string(tc::kMetadataFileName)).has_value();
    if (has_metadata) {
      const std::shared_ptr<const ByteSource> file = open_name(std::string(tc::kMetadataFileName));
      require_size_within(*file, options.max_metadata_bytes);
      stored_bytes_ = file->size_bytes();
      metadata_ = tc::read(*file);
      checksums.compare_rest([this](const std::string& name) { return storage->open(name); });
    }
    find_files(has_metadata);
    add_files();
    version =
        fmt::format("torch_checkpointing {}, {} rank{}", has_metadata ? metadata_.version : "without metadata.pkl",
                    metadata_.ranks, metadata_.ranks == 1 ? "" : "s");
    for (const auto& [key, files_of_item] : items_) read_item(key, files_of_item);
    if (differing_ > 0) {
      warnings.push_back(fmt::format(
          "{}: {} tensor{} that ranks share differ{} between them, for example '{}'; the lowest rank counts",
          path.string(), differing_, differing_ == 1 ? "" : "s", differing_ == 1 ? "s" : "", printable(differs_)));
    }
  }

  Extent locate(std::size_t tensor, std::size_t chunk) const override { return extents_[tensor][chunk]; }

  ObjectValue load_object(std::size_t i) const override { return object_values_[i]; }

 private:
  using ItemFiles = std::map<std::int64_t, tc::FileLayout>;  // by rank

  // Throws Error(corrupt) if what was made of the files that were read exceeds the budget of their size.
  void charge(std::uint64_t bytes, std::string_view what) {
    const std::uint64_t limit = ExpansionBudget(stored_bytes_).limit_bytes();
    if (__builtin_add_overflow(made_bytes_, bytes, &made_bytes_) || made_bytes_ > limit) {
      fail(ErrorCode::corrupt, "{}: {} take more than {}, expected at most 64 MiB or 16 times the files", path.string(),
           what, format_bytes(limit));
    }
  }

  // --- files

  void find_files(bool has_metadata) {
    std::set<std::string> listed;
    for (const tc::Item& item : metadata_.items) {
      entries_of_[item.key] = &item;
      ItemFiles& of_item = items_[item.key];
      for (std::int64_t rank = 0; rank < metadata_.ranks; ++rank) {
        const auto found = item.files.find(rank);
        const tc::FileLayout layout =
            found != item.files.end() ? found->second : tc::FileLayout{tc::to_string({item.key, rank}), {}};
        if (!listed.insert(layout.file).second) {
          fail(ErrorCode::corrupt, "{}: two ranks or items are stored in '{}', expected a file for each",
               storage->name_of(std::string(tc::kMetadataFileName)), printable(layout.file));
        }
        charge(sizeof(ItemFiles::value_type) + 2 * layout.file.size(), "the names of the ranks' files");
        of_item.emplace(rank, layout);
      }
    }
    std::int64_t highest = -1;
    std::string of_highest;
    std::set<std::int64_t> ranks;
    for (const std::string& name : storage->list()) {
      const std::optional<tc::FileName> parsed = tc::parse_file_name(name);
      if (!parsed || listed.contains(name)) continue;
      if (has_metadata && parsed->rank >= metadata_.ranks) {
        fail(ErrorCode::corrupt, "{}: found the file of rank {}, expected ranks 0 to {} as in {}",
             storage->name_of(name), parsed->rank, metadata_.ranks - 1, tc::kMetadataFileName);
      }
      ranks.insert(parsed->rank);
      if (parsed->rank > highest) {
        highest = parsed->rank;
        of_highest = name;
      }
      items_[parsed->item].emplace(parsed->rank, tc::FileLayout{name, tc::Serialization::torch});
    }
    if (has_metadata) return;
    metadata_.ranks = highest + 1;
    std::int64_t next = 0;
    for (const std::int64_t rank : ranks) {
      if (rank != next) {
        fail(ErrorCode::corrupt, "{}: found '{}' but no file of rank {}, expected files of all ranks from 0",
             storage->name(), printable(of_highest), next);
      }
      ++next;
    }
  }

  // Adds the files that are there, so that the budgets are those of all of them.
  void add_files() {
    std::uint64_t total = 0;
    for (const auto& [key, files_of_item] : items_) {
      for (const auto& [rank, layout] : files_of_item) {
        const std::uint32_t file = add_file(layout.file);
        files[file].rank = rank;
        if (files[file].size_bytes) {
          total += *files[file].size_bytes;
          file_numbers_.emplace(layout.file, file);
        } else {
          files.pop_back();
        }
      }
    }
    budgets_ = StateBudgets(total);
  }

  // --- items

  void read_item(const std::string& key, const ItemFiles& files_of_item) {
    std::map<std::string, std::size_t> numbers;
    std::vector<Leaf> leaves;  // in the order of the first file
    const auto leaf_of = [&](const LeafPlace& at) -> Leaf& {
      const auto [found, is_new] = numbers.try_emplace(name_of_path(at.path), leaves.size());
      if (is_new) leaves.push_back({at, {}, nullptr});
      return leaves[found->second];
    };
    const auto item = entries_of_.find(key);
    std::vector<std::pair<std::string, const tc::TensorEntry*>> listed;
    TextMap<const tc::TensorEntry*> entries;
    if (item != entries_of_.end()) {
      for (const tc::TensorEntry& entry : item->second->entries) {
        Path full{key};
        full.insert(full.end(), entry.path.begin(), entry.path.end());
        listed.emplace_back(name_of_path(full), &entry);
        if (!entries.emplace(listed.back()).second) {
          fail(ErrorCode::corrupt, "{}: the name '{}' occurs twice, expected unique names",
               storage->name_of(std::string(tc::kMetadataFileName)), printable(listed.back().first));
        }
      }
    }
    std::map<std::int64_t, std::string> missing;  // files by rank
    for (const auto& [rank, layout] : files_of_item) {
      const auto number = file_numbers_.find(layout.file);
      if (number == file_numbers_.end()) {
        missing[rank] = layout.file;
        continue;
      }
      const std::uint32_t file = number->second;
      stored_bytes_ += *files[file].size_bytes;
      const auto add = [&, file, rank = rank](const LeafPlace& at, SavedLeaf saved, const pickle::NodeRef* value) {
        Leaf& leaf = leaf_of(at);
        if (!leaf.saved.empty() && leaf.saved.back().rank == rank) {
          fail(ErrorCode::corrupt, "{}: the name '{}' occurs twice, expected unique names",
               storage->name_of(files[file].name), printable(name_of_path(at.path)));
        }
        const auto found = entries.find(name_of_path(at.path));
        if (found != entries.end()) leaf.listed = found->second;
        saved.rank = rank;
        saved.file = file;
        if (saved.tensor) saved.part = part_of(leaf, rank, *saved.tensor, value);
        leaf.saved.push_back(std::move(saved));
      };
      if (layout.serialization == tc::Serialization::safetensors) {
        read_safetensors(key, file, entries, add);
      } else {
        read_archive(key, file, add);
      }
    }
    for (const auto& [name, entry] : listed) {
      if (numbers.contains(name)) continue;
      Path full{key};
      full.insert(full.end(), entry->path.begin(), entry->path.end());
      leaf_of({std::move(full)}).listed = entry;
    }
    for (const Leaf& leaf : leaves) take_leaf(leaf, missing);
    if (item == entries_of_.end()) {
      warn_of_gaps(key, files_of_item);
    } else if (!missing.empty()) {
      warnings.push_back(fmt::format("{}: '{}' is not there; other ranks have the tensors that {} lists for it",
                                     path.string(), printable(missing.begin()->second), tc::kMetadataFileName));
    }
  }

  // Ranks may save different items. Still, an item that most ranks have was probably on all of them.
  void warn_of_gaps(const std::string& key, const ItemFiles& files_of_item) {
    const auto count = static_cast<std::int64_t>(files_of_item.size());
    if (count == metadata_.ranks || count == 1) return;
    std::int64_t rank = 0;
    while (files_of_item.contains(rank)) ++rank;
    warnings.push_back(fmt::format("{}: '{}' is not there, though {} of {} ranks have a file of '{}'", path.string(),
                                   tc::to_string({key, rank}), count, metadata_.ranks, key));
  }

  template <typename Add>
  void read_archive(const std::string& key, std::uint32_t file, const Add& add) {
    const std::shared_ptr<const ByteSource> source = open_file(file);
    torch_archive::OpenLimits limits;
    limits.pickle_bytes = max_pickle_bytes_;
    const auto archive =
        std::make_shared<const torch_archive::Archive>(torch_archive::open(*source, 0, source->size_bytes(), limits));
    StateFlattener flattener(source->name(), budgets_.leaves, StateFlattener::Tuples::are_flattened);
    pickle::RepeatedParts parts;
    flattener.flatten(archive->tree.root(), {{key}}, [&](pickle::NodeRef value, const LeafPlace& at) {
      with_context([&] { return fmt::format("{}: '{}'", source->name(), printable(name_of_path(at.path))); },
                   [&] {
                     SavedLeaf saved;
                     std::optional<torch_archive::TensorRef> tensor = torch_archive::as_tensor(value);
                     const bool is_plain = tensor.has_value();
                     if (!tensor) tensor = torch_archive::as_local_tensor(value);
                     if (tensor) {
                       flattener.charge_tensor(tensor->sizes.size());
                       saved.tensor = saved_tensor(*tensor, archive->storage_entry(tensor->storage), file);
                     } else {
                       charge_shared(budgets_.objects, parts, value);
                       saved.object.value = value;
                       saved.object.storages = storages_of(value, *archive, file);
                       saved.object.tree = std::shared_ptr<const pickle::Tree>(archive, &archive->tree);
                     }
                     add(at, std::move(saved), tensor && !is_plain ? &value : nullptr);
                     return 0;
                   });
    });
  }

  static SavedTensor saved_tensor(const torch_archive::TensorRef& tensor, const zip::Entry& entry, std::uint32_t file) {
    const Extent extent = extent_of(tensor, entry, file);
    return {tensor.dtype, tensor.requires_grad, tensor.sizes,   tensor.strides,
            file,         extent.offset_bytes,  extent.checksum};
  }

  template <typename Add>
  void read_safetensors(const std::string& key, std::uint32_t file, const TextMap<const tc::TensorEntry*>& entries,
                        const Add& add) {
    const std::shared_ptr<const ByteSource> source = open_file(file);
    const safetensors::Header header = safetensors::read_header(*source);
    for (const safetensors::Tensor& stored : header.tensors) {
      LeafPlace at{{key}};
      const auto found = entries.find(stored.name.empty() ? key : key + "." + stored.name);
      if (found != entries.end()) {
        at.path.insert(at.path.end(), found->second->path.begin(), found->second->path.end());
      } else {
        at.path.emplace_back(stored.name);
      }
      SavedLeaf saved;
      saved.tensor = SavedTensor{stored.dtype, false,
                                 stored.shape, row_major_strides(stored.shape),
                                 file,         header.data_offset_bytes + stored.begin_bytes,
                                 std::nullopt};
      add(at, std::move(saved), nullptr);
    }
  }

  // --- tensors

  // Charges the boxes of a part before they are made: a strided shard has up to split_factor of them. For each
  // dimension, all placements are searched.
  void charge_boxes(const MeshLayout& layout) {
    const std::uint64_t searched = (layout.size().size() + 1) * (layout.placements().size() + 1);
    charge(searched * sizeof(Placement), "the dimensions of sharded tensors");
    std::uint64_t boxes = 1;
    const auto multiply = [](std::uint64_t& product, std::int64_t factor, std::uint64_t limit) {
      if (__builtin_mul_overflow(product, static_cast<std::uint64_t>(factor), &product)) product = limit;
      product = std::min(product, limit);
    };
    for (std::size_t d = 0; d < layout.size().size(); ++d) {
      std::uint64_t of_dim = 1;
      for (const Placement& placement : layout.placements()) {
        if (!placement.is_shard(static_cast<std::int64_t>(d))) continue;
        multiply(of_dim, placement.split_factor(), static_cast<std::uint64_t>(layout.size()[d]));
      }
      multiply(boxes, static_cast<std::int64_t>(of_dim), std::uint64_t{1} << 40);
    }
    if (boxes > 1) charge(boxes * sizeof(LocalBox), "the parts of strided shards");
  }

  // Returns which part of a tensor a rank has, or nothing if it is not distributed. `dtensor` is null for a plain
  // tensor.
  std::optional<Part> part_of(const Leaf& leaf, std::int64_t rank, const SavedTensor& tensor,
                              const pickle::NodeRef* dtensor) {
    const auto where = [&] {
      return fmt::format("{}: '{}'", storage->name_of(files[tensor.file].name),
                         printable(name_of_path(leaf.place.path)));
    };
    std::optional<MeshLayout> layout;
    std::vector<std::int64_t> coordinate;
    DType dtype = tensor.dtype;
    std::string_view described_by = "its DTensor";
    for (std::size_t g = 0; leaf.listed != nullptr && g < leaf.listed->groups.size(); ++g) {
      const tc::Group& group = leaf.listed->groups[g];
      const auto place = group.mesh->places.find(rank);
      if (place == group.mesh->places.end()) continue;
      layout.emplace(group.shape, group.mesh->shape, group.placements);
      coordinate = mesh_coordinate(group.mesh->shape, place->second);
      dtype = group.dtype;
      described_by = tc::kMetadataFileName;
      break;
    }
    if (!layout && dtensor != nullptr) {
      torch_archive::DTensorRef found = torch_archive::as_dtensor(*dtensor).value();
      checked_multiply(checked_numel(found.shape, "the shape"), dtype_size(dtype), "the size of the tensor");
      try {
        layout.emplace(std::move(found.shape), std::move(found.mesh_shape), std::move(found.placements));
      } catch (const Error& error) {
        fail(ErrorCode::corrupt, "{}: {}", where(), error.what());
      }
      coordinate = std::move(found.coordinate);
    }
    if (!layout) return std::nullopt;
    charge_boxes(*layout);
    Part part{layout->size(), layout->local_shape(coordinate), layout->local_boxes(coordinate)};
    if (part.local.sizes != tensor.sizes || dtype != tensor.dtype) {
      fail(ErrorCode::corrupt, "{}: found {} {}, expected {} {} as in {}", where(), dtype_name(tensor.dtype),
           shape_to_string(tensor.sizes), dtype_name(dtype), shape_to_string(part.local.sizes), described_by);
    }
    return part;
  }

  void take_leaf(const Leaf& leaf, const std::map<std::int64_t, std::string>& missing) {
    const bool is_distributed = leaf.listed != nullptr || std::any_of(leaf.saved.begin(), leaf.saved.end(),
                                                                      [](const auto& one) { return one.part; });
    if (is_distributed) return take_distributed(leaf, missing);
    for (const SavedLeaf& one : leaf.saved) {
      if (one.tensor || leaf.saved.size() == 1) continue;
      with_context(
          [&] {
            return fmt::format("{}: '{}'", storage->name_of(files[one.file].name),
                               printable(name_of_path(leaf.place.path)));
          },
          [&] { charge_repeated(budgets_.objects, one.object.value); });
    }
    const bool is_same = std::all_of(leaf.saved.begin() + 1, leaf.saved.end(),
                                     [&](const SavedLeaf& one) { return same_leaves(leaf.saved[0], one); });
    if (is_same) {
      const std::string name = name_of_path(leaf.place.path);
      take_full(name, leaf.place, leaf.saved[0]);
      for (const SavedLeaf& one : leaf.saved) {
        if (one.tensor && one.rank != leaf.saved[0].rank) add_copy(name, *one.tensor);
      }
      return;
    }
    for (const SavedLeaf& one : leaf.saved) {
      LeafPlace at = leaf.place;
      at.path.emplace_back(fmt::format("rank_{}", one.rank));
      take_full(name_of_path(at.path), at, one);
    }
  }

  static LocalBox full_box(const std::vector<std::int64_t>& shape) {
    return {Box::full(shape), std::vector<std::int64_t>(shape.size(), 0)};
  }

  void take_full(const std::string& name, const LeafPlace& at, const SavedLeaf& saved) {
    if (!saved.tensor) {
      objects.push_back({name, {}, at.path, tensors.size() + objects.size(), at.keys});
      object_values_.push_back(saved.object);
      return;
    }
    begin_tensor(name, at, saved.tensor->dtype, saved.tensor->requires_grad, saved.tensor->sizes);
    add_chunk(*saved.tensor, full_box(saved.tensor->sizes));
  }

  void take_distributed(const Leaf& leaf, const std::map<std::int64_t, std::string>& missing) {
    const std::string name = name_of_path(leaf.place.path);
    const auto first = std::find_if(leaf.saved.begin(), leaf.saved.end(), [](const auto& one) { return one.part; });
    const bool is_listed = leaf.listed != nullptr;
    const DType dtype = is_listed ? leaf.listed->groups[0].dtype : first->tensor->dtype;
    const std::vector<std::int64_t>& shape = is_listed ? leaf.listed->groups[0].shape : first->part->shape;
    for (const SavedLeaf& one : leaf.saved) {
      const auto where = [&] {
        return fmt::format("{}: '{}'", storage->name_of(files[one.file].name), printable(name));
      };
      if (!one.part) {
        fail(ErrorCode::corrupt, "{} is {}, expected a part of the tensor {} {} as {}", where(),
             one.tensor ? "a plain tensor" : "an object", dtype_name(dtype), shape_to_string(shape),
             is_listed ? "metadata.pkl lists it" : "on other ranks");
      }
      if (one.part->shape != shape || one.tensor->dtype != dtype) {
        fail(ErrorCode::corrupt, "{} is {} {}, expected {} {} as on other ranks", where(),
             dtype_name(one.tensor->dtype), shape_to_string(one.part->shape), dtype_name(dtype),
             shape_to_string(shape));
      }
    }
    begin_tensor(name, leaf.place, dtype, first != leaf.saved.end() && first->tensor->requires_grad, shape);
    std::map<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>, const SavedTensor*> have;
    bool differs = false;
    for (const SavedLeaf& one : leaf.saved) {
      for (const LocalBox& box : one.part->boxes) {
        const auto [found, is_new] = have.try_emplace({box.box.offsets, box.box.sizes}, &*one.tensor);
        if (is_new) {
          add_chunk(*one.tensor, box);
        } else {
          differs = differs || (one.tensor->checksum && !found->second->same_as(*one.tensor));
          const Extent extent = one.tensor->extent(box);
          copies.push_back({name, {one.file, extent.offset_bytes, extent.length_bytes}});
        }
      }
    }
    if (tensors.back().size_bytes() == 0) {
      SavedTensor empty;
      empty.file = leaf.saved.empty() ? StoredRange::kNoFile : leaf.saved[0].file;
      add_chunk(empty, full_box(tensors.back().shape));
    }
    if (differs && differing_++ == 0) differs_ = name;
    if (leaf.listed != nullptr) require_parts(leaf, name, missing);
  }

  // Throws if a part of a tensor is not there that metadata.pkl promises and no other rank has.
  void require_parts(const Leaf& leaf, const std::string& name, const std::map<std::int64_t, std::string>& missing) {
    const TensorInfo& info = tensors.back();
    std::size_t listed = 0;
    for (const tc::Group& group : leaf.listed->groups) listed += group.mesh->ranks.size();
    if (leaf.saved.size() >= listed || info.size_bytes() == 0 || !find_hole(info.shape, info.chunks)) return;
    std::set<std::int64_t> have;
    for (const SavedLeaf& one : leaf.saved) have.insert(one.rank);
    const auto is_lost = [&](std::int64_t rank) { return !have.contains(rank); };
    MissingFiles::NamesOfFile lost;
    for (const tc::Group& group : leaf.listed->groups) {
      for (const std::int64_t rank : group.mesh->ranks) {
        if (const auto found = missing.find(rank); found != missing.end() && is_lost(rank))
          lost[found->second] = {name};
      }
    }
    if (!lost.empty()) throw MissingFiles(path.string(), std::move(lost));
    for (const tc::Group& group : leaf.listed->groups) {
      const auto rank = std::find_if(group.mesh->ranks.begin(), group.mesh->ranks.end(), is_lost);
      if (rank == group.mesh->ranks.end()) continue;
      fail(ErrorCode::corrupt, "{}: '{}' is not in the file of rank {}, expected it there as in {}", path.string(),
           printable(name), *rank, tc::kMetadataFileName);
    }
  }

  void begin_tensor(const std::string& name, const LeafPlace& at, DType dtype, bool requires_grad,
                    std::vector<std::int64_t> shape) {
    TensorInfo info;
    info.name = name;
    info.dtype = dtype;
    info.requires_grad = requires_grad;
    info.shape = std::move(shape);
    info.chunks = BoxList(info.shape.size());
    info.path = at.path;
    info.keys = at.keys;
    info.position = tensors.size() + objects.size();
    tensors.push_back(std::move(info));
    extents_.emplace_back();
  }

  void add_chunk(const SavedTensor& tensor, const LocalBox& box) {
    TensorInfo& info = tensors.back();
    Extent extent;
    extent.file = tensor.file;
    if (volume(box.box) > 0) extent = tensor.extent(box);
    info.chunks.push_back(box.box);
    info.stored.push_back({extent.file, extent.offset_bytes, extent.length_bytes});
    extents_.back().push_back(std::move(extent));
  }

  void add_copy(const std::string& name, const SavedTensor& tensor) {
    const LocalBox box = full_box(tensor.sizes);
    if (volume(box.box) == 0) return;
    const Extent extent = tensor.extent(box);
    copies.push_back({name, {extent.file, extent.offset_bytes, extent.length_bytes}});
  }

  std::uint64_t max_pickle_bytes_;
  std::uint64_t stored_bytes_ = 0, made_bytes_ = 0;  // of the files that were read, and what they were charged
  StateBudgets budgets_{0};
  tc::CheckpointMetadata metadata_;
  std::map<std::string, ItemFiles> items_;
  TextMap<std::uint32_t> file_numbers_;                // of those that are there
  std::map<std::string, const tc::Item*> entries_of_;  // in metadata_
  std::vector<std::vector<Extent>> extents_;
  std::vector<ObjectValue> object_values_;
  std::size_t differing_ = 0;
  std::string differs_;
};

}  // namespace

bool is_torch_checkpointing_file(const std::string& name) {
  const std::optional<tc::FileName> parsed = tc::parse_file_name(name);
  return parsed && parsed->rank == 0 && !parse_step_name(name);
}

std::unique_ptr<SourceBackend> open_torch_checkpointing(const std::shared_ptr<const Storage>& storage,
                                                        const OpenOptions& options) {
  return std::make_unique<TorchCheckpointingSource>(storage, options);
}

}  // namespace tessera::checkpoint
