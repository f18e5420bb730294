// Reads a DCP directory: `.metadata`, or one `__<rank>.metadata` per rank that saved without collectives.

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "checkpoint/buffer.h"
#include "checkpoint/source/expansion.h"
#include "checkpoint/source/known_items.h"
#include "checkpoint/source/source.h"
#include "checkpoint/transform/plain_items.h"
#include "tessera/base/checked.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/checkpoint/internal/file_names.h"
#include "tessera/format/dcp_metadata.h"
#include "tessera/format/python_value.h"

namespace tessera::checkpoint {
namespace {

std::vector<std::string> rank_metadata_names(const Storage& storage) {
  std::vector<std::pair<std::int64_t, std::string>> found;
  for (const std::string& name : storage.list()) {
    if (const auto rank = parse_rank_metadata_name(name)) found.emplace_back(*rank, name);
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> names;
  names.reserve(found.size());
  for (auto& [rank, name] : found) names.push_back(std::move(name));
  return names;
}

std::string version_name(const dcp::Metadata& metadata) {
  if (metadata.version) return *metadata.version;
  return metadata.dialect == dcp::Dialect::torch_1_13 ? "PyTorch 1.13" : "PyTorch 2.x";
}

// A source that reads a range of a file ahead in one piece, for many small reads in it. Other reads go to the file.
class ReadAhead final : public ByteSource {
 public:
  ReadAhead(const ByteSource& file, std::uint64_t offset_bytes, std::uint64_t length_bytes)
      : file_(file), offset_bytes_(offset_bytes) {
    thread_local Buffer buffer;
    bytes_ = buffer.get(length_bytes);
    file.read_at(offset_bytes, bytes_);
  }
  void read_at(std::uint64_t offset_bytes, MutableByteView out) const override {
    if (offset_bytes < offset_bytes_ || offset_bytes - offset_bytes_ > bytes_.size() ||
        out.size() > bytes_.size() - (offset_bytes - offset_bytes_)) {
      return file_.read_at(offset_bytes, out);
    }
    const ByteView part = ByteView(bytes_).subspan(offset_bytes - offset_bytes_, out.size());
    std::copy(part.begin(), part.end(), out.begin());
  }
  std::uint64_t size_bytes() const override { return file_.size_bytes(); }
  const std::string& name() const override { return file_.name(); }
  ByteView bytes() const { return bytes_; }

 private:
  const ByteSource& file_;
  std::uint64_t offset_bytes_;
  MutableByteView bytes_;
};

// Charges the stored bytes of each object once, when it is loaded first: several objects may name the same.
// Thread-safe.
class LoadedBytes {
 public:
  // `stored_bytes` is the size of all files.
  LoadedBytes(std::size_t objects, std::uint64_t stored_bytes)
      : charged_(objects), budget_(stored_bytes, stored_bytes) {}

  // Call this before the object is read. Throws Error(corrupt), without the place, if all objects take too much.
  void charge(std::size_t i, std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (!charged_[i] && !budget_.charge(bytes)) {
      fail(ErrorCode::corrupt,
           "the stored bytes that objects share stand for more than {}, expected at most 64 MiB or 16 times the files",
           format_bytes(budget_.limit_bytes()));
    }
    charged_[i] = true;
  }

 private:
  std::mutex mutex_;
  std::vector<bool> charged_;
  ExpansionBudget budget_;
};

// Items up to this size are read in one piece to locate their elements.
constexpr std::uint64_t kReadAheadBytes = 64u << 10;

class DcpSource final : public SourceBackend {
 public:
  DcpSource(const std::shared_ptr<const Storage>& storage_in, const OpenOptions& options)
      : SourceBackend(storage_in->name(), storage_in, sidecar_of(*storage_in, options)),
        registry_(options.transforms != nullptr ? options.transforms : std::make_shared<const TransformRegistry>()),
        max_object_bytes_(options.max_metadata_bytes) {
    kind = SourceKind::dcp;
    std::vector<std::string> names;
    if (options.metadata != nullptr || storage->size_bytes(std::string(kMetadataFileName))) {
      names = {std::string(kMetadataFileName)};
    } else {
      names = rank_metadata_names(*storage);
    }
    for (std::size_t i = 0; i < names.size(); ++i) {
      const std::shared_ptr<const ByteSource> file =
          options.metadata != nullptr ? checksums.compared(names[i], options.metadata) : open_name(names[i]);
      require_size_within(*file, options.max_metadata_bytes);
      dcp::Metadata part = dcp::read(*file);
      checksums.compare_rest([&](const std::string& name) {
        return options.metadata != nullptr ? options.metadata : storage->open(name);
      });
      take_entries(part, names[i], names.size() == 1);
      if (i == 0) {
        metadata_ = std::move(part);
      } else {
        take_unclaimed(part);
      }
    }
    known_boxes_.clear();
    loaded_ = std::make_unique<LoadedBytes>(objects.size(), stored_bytes(files));
    version = version_name(metadata_);
    description_files = names;
    if (names.size() > 1) version += fmt::format(", {} ranks' metadata", names.size());
  }

  const dcp::Metadata* dcp_metadata() const override { return &metadata_; }

  StoredRange without_transforms(const StoredRange& stored) const override {
    const auto found = transformed_numbers_.find({stored.file, stored.offset_bytes});
    if (found == transformed_numbers_.end()) return stored;
    const std::uint32_t file = kPlainItems + found->second;
    return {file, 0, open_file(file)->size_bytes()};
  }

  Extent locate(std::size_t tensor, std::size_t chunk) const override {
    const TensorInfo& info = tensors[tensor];
    const StoredRange& stored = info.stored[chunk];
    const auto where = [&] {
      return fmt::format("{} at byte {}: tensor '{}', chunk {}", storage->name_of(files[stored.file].name),
                         stored.offset_bytes, printable(info.name), to_string(info.chunks[chunk]));
    };
    if (stored.file == StoredRange::kNoFile) {
      fail(ErrorCode::corrupt,
           "{}: tensor '{}', chunk {}: the metadata does not specify where it is stored, expected a file and a range",
           path.string(), printable(info.name), to_string(info.chunks[chunk]));
    }
    std::shared_ptr<const ByteSource> file = open_file(stored.file);
    check_bounds(*file, stored, where);
    const StoredRange item = with_context(where, [&] { return without_transforms(stored); });
    if (item.file != stored.file) file = open_file(item.file);
    const auto extent = [&](const KnownItems::Elements& elements) -> Extent {
      const std::uint64_t begin = item.offset_bytes + elements.offset_bytes;
      const Extent::Checksum checksum{begin, elements.length_bytes, elements.crc32};
      return {item.file, begin, elements.length_bytes, {}, checksum};
    };
    const std::span<const std::int64_t> sizes = info.chunks[chunk].sizes;
    const bool is_large = item.length_bytes > kReadAheadBytes;
    // Of a large item, the elements need not be read. A file that is compared block by block has small parts in memory.
    const bool reads_parts = is_large || file->compares_every_byte();
    if (reads_parts) {
      const auto elements = known_items_.find(*file, item.offset_bytes, item.length_bytes, info.dtype, sizes);
      if (elements) return extent(*elements);
    }
    if (is_large) {
      return parsed_extent(torch_archive::open(*file, item.offset_bytes, item.length_bytes), tensor, chunk, item,
                           where);
    }
    const ReadAhead ahead(*file, item.offset_bytes, item.length_bytes);
    if (!reads_parts) {
      if (const auto elements = known_items_.find(ahead.bytes(), info.dtype, sizes)) return extent(*elements);
    }
    return parsed_extent(torch_archive::open(ahead, item.offset_bytes, item.length_bytes), tensor, chunk, item, where);
  }

  ObjectValue load_object(std::size_t i) const override {
    const ObjectInfo& info = objects[i];
    const StoredRange& stored = info.stored;
    if (stored.file == StoredRange::kNoFile) {
      fail(ErrorCode::corrupt,
           "{}: object '{}': the metadata does not specify where it is stored, expected a file and a range",
           path.string(), printable(info.name));
    }
    const auto where = [&] {
      return fmt::format("{} at byte {}: object '{}'", storage->name_of(files[stored.file].name), stored.offset_bytes,
                         printable(info.name));
    };
    check_bounds(*open_file(stored.file), stored, where);
    const StoredRange item = with_context(where, [&] {
      loaded_->charge(i, stored.length_bytes);
      return without_transforms(stored);
    });
    auto archive = std::make_shared<torch_archive::Archive>(
        torch_archive::open(*open_file(item.file), item.offset_bytes, item.length_bytes));
    ObjectValue result;
    result.value = archive->tree.root();
    result.storages = with_context(where, [&] { return storages_of(result.value, *archive, item.file); });
    result.tree = std::shared_ptr<const pickle::Tree>(archive, &archive->tree);
    return result;
  }

 private:
  template <typename Where>
  static void check_bounds(const ByteSource& file, const StoredRange& stored, const Where& where) {
    const std::uint64_t size = file.size_bytes();
    if (stored.offset_bytes > size || stored.length_bytes > size - stored.offset_bytes) {
      fail(ErrorCode::corrupt,
           "{}: the stored item of {} bytes extends past the end of the file, expected it within its {} bytes", where(),
           stored.length_bytes, size);
    }
  }

  // Returns where the elements of a chunk are, of which `item` is the archive.
  template <typename Where>
  Extent parsed_extent(const torch_archive::Archive& archive, std::size_t tensor, std::size_t chunk,
                       const StoredRange& item, const Where& where) const {
    const TensorInfo& info = tensors[tensor];
    const std::optional<torch_archive::TensorRef> found =
        with_context(where, [&] { return torch_archive::as_tensor(archive.tree.root()); });
    if (!found) {
      fail(ErrorCode::corrupt, "{}: the stored item is a {}, expected a strided tensor", where(),
           pickle::type_name(archive.tree.root()));
    }
    if (found->dtype != info.dtype) {
      fail(ErrorCode::corrupt, "{}: the stored item has dtype {}, expected {} as in the metadata", where(),
           dtype_name(found->dtype), dtype_name(info.dtype));
    }
    const BoxView box = info.chunks[chunk];
    if (!std::equal(found->sizes.begin(), found->sizes.end(), box.sizes.begin(), box.sizes.end())) {
      fail(ErrorCode::corrupt, "{}: the stored item has shape {}, expected {} as in the metadata", where(),
           shape_to_string(found->sizes), shape_to_string(box.sizes));
    }
    return extent_of(*found, archive.storage_entry(found->storage), item.file);
  }

  // Room for the archive of a storage that is larger than the chunk, as a view of it.
  static std::uint64_t limit_of_chunk(const dcp::MetadataEntry& entry, std::size_t chunk) {
    const auto bytes = static_cast<std::uint64_t>(volume(entry.chunks[chunk])) *
                       static_cast<std::uint64_t>(dtype_size(entry.properties.dtype));
    return (std::uint64_t{1} << 20) + 2 * bytes;
  }

  std::shared_ptr<const ByteSource> open_plain_item(std::uint32_t number) const override {
    return plain_items_.get(number, [&](const std::shared_ptr<MemoryOfItems>& memory) {
      const Transformed& item = transformed_[number];
      const std::vector<TransformPtr> transforms = registry_->create(item.descriptors);
      return undo_transforms(*open_file(item.stored.file), item.stored.offset_bytes, item.stored.length_bytes,
                             transforms, item.limit_bytes, memory);
    });
  }

  std::uint32_t file_index(const std::string& name) {
    const auto [found, is_new] = file_numbers_.try_emplace(name, 0);
    if (is_new) found->second = add_file(name);
    return found->second;
  }

  // `limit_bytes` is for the item without its transforms; by default, it depends on the bytes that are stored.
  StoredRange range_of(const dcp::Metadata& part, const dcp::StoredItem& item,
                       std::optional<std::uint64_t> limit_bytes) {
    if (item.file == dcp::StoredItem::kNoFile) return {};
    const StoredRange range{file_index(part.files[item.file]), static_cast<std::uint64_t>(item.offset_bytes),
                            static_cast<std::uint64_t>(item.length_bytes)};
    if (item.transforms != 0) {
      const auto number = static_cast<std::uint32_t>(transformed_.size());
      if (transformed_numbers_.try_emplace({range.file, range.offset_bytes}, number).second) {
        const std::uint64_t expanded_bytes =
            std::min(max_object_bytes_, ExpansionBudget(range.length_bytes).limit_bytes());
        transformed_.push_back({range, part.transforms[item.transforms], limit_bytes.value_or(expanded_bytes)});
      }
    }
    return range;
  }

  // The names of one part are unique. If there is `only_part`, no entry is looked up.
  void take_entries(dcp::Metadata& part, const std::string& metadata_name, bool only_part) {
    for (const std::string& name : part.files) file_index(name);
    if (only_part) tensors.reserve(part.entries.size());
    for (std::size_t i = 0; i < part.entries.size(); ++i) {
      dcp::MetadataEntry& entry = part.entries[i];
      Path entry_path = part.paths ? (*part.paths)[i] : Path();
      if (entry.is_tensor) {
        take_tensor(part, entry, std::move(entry_path), metadata_name, only_part);
        continue;
      }
      const StoredRange range = range_of(part, entry.items.empty() ? dcp::StoredItem() : entry.items[0], std::nullopt);
      if (only_part || object_numbers_.try_emplace(entry.name, objects.size()).second) {
        objects.push_back({entry.name, range, std::move(entry_path), tensors.size() + objects.size()});
      } else {
        add_copy(entry.name, range);
      }
    }
  }

  void add_copy(const std::string& name, const StoredRange& range) {
    if (range.file != StoredRange::kNoFile) copies.push_back({name, range});
  }

  // Ranks that save without collectives each describe the same tensor with their own chunks. If several have the same
  // chunk (a replicated tensor), all but the first are copies.
  void take_tensor(const dcp::Metadata& part, dcp::MetadataEntry& entry, Path entry_path,
                   const std::string& metadata_name, bool only_part) {
    const std::size_t number =
        only_part ? tensors.size() : tensor_numbers_.try_emplace(entry.name, tensors.size()).first->second;
    std::vector<StoredRange> ranges;
    ranges.reserve(entry.items.size());
    for (std::size_t c = 0; c < entry.items.size(); ++c) {
      ranges.push_back(range_of(part, entry.items[c], limit_of_chunk(entry, c)));
    }
    if (number == tensors.size()) {
      TensorInfo info;
      info.name = entry.name;
      info.dtype = entry.properties.dtype;
      info.requires_grad = entry.properties.requires_grad;
      info.shape = std::move(entry.shape);
      info.chunks = std::move(entry.chunks);
      info.stored = std::move(ranges);
      info.path = std::move(entry_path);
      info.position = tensors.size() + objects.size();
      entry.items = {};
      checked_multiply(checked_numel(info.shape, info.name), dtype_size(info.dtype), info.name);
      tensors.push_back(std::move(info));
      return;
    }
    TensorInfo& info = tensors[number];
    if (info.dtype != entry.properties.dtype || info.shape != entry.shape) {
      fail(ErrorCode::corrupt, "{}: tensor '{}' is {} {}, expected {} {} as in another rank's metadata",
           storage->name_of(metadata_name), printable(entry.name), dtype_name(entry.properties.dtype),
           shape_to_string(entry.shape), dtype_name(info.dtype), shape_to_string(info.shape));
    }
    const auto [known, is_first] = known_boxes_.try_emplace(number);
    auto& have = known->second;
    for (std::size_t c = 0; is_first && c < info.chunks.size(); ++c) {
      const Box box(info.chunks[c]);
      have.emplace(box.offsets, box.sizes);
    }
    for (std::size_t c = 0; c < entry.chunks.size(); ++c) {
      const Box box(entry.chunks[c]);
      if (!have.emplace(box.offsets, box.sizes).second) {
        add_copy(entry.name, ranges[c]);
        continue;
      }
      info.chunks.push_back(box);
      info.stored.push_back(ranges[c]);
    }
  }

  void take_unclaimed(const dcp::Metadata& part) {
    TextMap<std::uint32_t> numbers;
    if (!part.unclaimed.empty()) {
      for (std::uint32_t f = 0; f < metadata_.files.size(); ++f) numbers.try_emplace(metadata_.files[f], f);
    }
    for (const dcp::UnclaimedItem& item : part.unclaimed) {
      dcp::UnclaimedItem copy = item;
      if (item.item.file != dcp::StoredItem::kNoFile) {
        const std::string& name = part.files[item.item.file];
        const auto [found, is_new] = numbers.try_emplace(name, static_cast<std::uint32_t>(metadata_.files.size()));
        copy.item.file = found->second;
        if (is_new) metadata_.files.push_back(name);
      }
      metadata_.unclaimed.push_back(std::move(copy));
    }
  }

  dcp::Metadata metadata_;  // chunks were moved from its entries to `tensors`
  TextMap<std::uint32_t> file_numbers_;
  TextMap<std::size_t> tensor_numbers_, object_numbers_;
  // Offsets and sizes of the chunks of each tensor that several parts have, while parts are taken.
  using OffsetsAndSizes = std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>;
  std::map<std::size_t, std::set<OffsetsAndSizes>> known_boxes_;

  struct Transformed {
    StoredRange stored;
    std::vector<std::string> descriptors;
    std::uint64_t limit_bytes;
  };
  std::shared_ptr<const TransformRegistry> registry_;
  std::uint64_t max_object_bytes_;
  std::unique_ptr<LoadedBytes> loaded_;
  std::vector<Transformed> transformed_;
  std::map<std::pair<std::uint32_t, std::uint64_t>, std::uint32_t> transformed_numbers_;  // by file and offset
  mutable PlainItems plain_items_;
  mutable KnownItems known_items_;
};

}  // namespace

bool is_dcp(const Storage& storage) {
  return storage.size_bytes(std::string(kMetadataFileName)) || !rank_metadata_names(storage).empty();
}

std::unique_ptr<SourceBackend> open_dcp(std::shared_ptr<const Storage> storage, const OpenOptions& options) {
  return std::make_unique<DcpSource>(std::move(storage), options);
}

}  // namespace tessera::checkpoint
