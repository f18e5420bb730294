#include "format/dcp/check.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "format/dcp/names.h"
#include "format/dcp/offsets.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/name_index.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/format/internal/pickle_text.h"

namespace tessera::dcp {

namespace {

class Checker {
 public:
  explicit Checker(const Metadata& metadata) : metadata_(metadata) {}

  void run() {
    check_files();
    for (std::size_t i = 0; i < metadata_.entries.size(); ++i) check_entry(metadata_.entries[i], i);
    check_paths();
    check_unclaimed();
    check_extras();
  }

 private:
  template <typename... Args>
  [[noreturn]] static void refuse(std::string_view name, fmt::format_string<Args...> format, Args&&... args) {
    fail(ErrorCode::invalid_argument, "write DCP metadata: '{}': {}", printable(name),
         fmt::format(format, std::forward<Args>(args)...));
  }

  static void check_text(std::string_view name, std::string_view text) {
    if (!pickle::is_python_utf8(text))
      refuse(name, "'{}' is not UTF-8, expected UTF-8 as a pickle requires", printable(text));
  }

  void check_files() {
    if (metadata_.transforms.empty() || !metadata_.transforms[0].empty()) {
      fail(ErrorCode::invalid_argument, "write DCP metadata: transforms has no empty first list, expected one");
    }
    std::unordered_set<std::string_view, TextHash> files;
    for (const std::string& file : metadata_.files) {
      check_text(file, file);
      if (!files.insert(file).second) refuse(file, "duplicate file in files, expected unique files");
    }
    for (const std::vector<std::string>& transforms : metadata_.transforms) {
      for (const std::string& text : transforms) check_text("transforms", text);
    }
  }

  void check_entry(const MetadataEntry& entry, std::size_t number) {
    check_text(entry.name, entry.name);
    if (!numbers_.add(entry.name, number)) refuse(entry.name, "duplicate name in entries, expected unique names");
    for (const StoredItem& item : entry.items) check_item(entry.name, item, true);
    if (!entry.is_tensor) {
      if (entry.items.size() != 1 || !entry.chunks.empty() || !entry.shape.empty()) {
        refuse(entry.name, "an object has {} items, {} chunks and shape {}, expected one item and no chunks or shape",
               entry.items.size(), entry.chunks.size(), shape_to_string(entry.shape));
      }
      return;
    }
    if (entry.items.size() != entry.chunks.size()) {
      refuse(entry.name, "{} items for {} chunks, expected as many", entry.items.size(), entry.chunks.size());
    }
    if (!entry.chunks.empty() && entry.chunks.rank() != entry.shape.size()) {
      refuse(entry.name, "chunks have {} dimensions, expected {} as in shape {}", entry.chunks.rank(),
             entry.shape.size(), shape_to_string(entry.shape));
    }
    check_text(entry.name, entry.properties.layout);
    check_box(entry, {{}, entry.shape});
    for (std::size_t i = 0; i < entry.chunks.size(); ++i) check_box(entry, entry.chunks[i]);
    OffsetIndex(entry.chunks).for_each_equal([&](std::size_t first, std::size_t other) {
      if (entry.items[first] == entry.items[other]) return;
      refuse(entry.name,
             "chunks {} and {} begin at the same offsets {} and have different items, expected the same item", first,
             other, shape_to_string(entry.chunks[first].offsets));
    });
  }

  // A shape has no offsets.
  static void check_box(const MetadataEntry& entry, BoxView box) {
    std::int64_t bytes = dtype_size(entry.properties.dtype), end = 0;
    for (std::size_t d = 0; d < box.sizes.size(); ++d) {
      const std::int64_t offset = box.offsets.empty() ? 0 : box.offsets[d];
      if (offset < 0 || box.sizes[d] < 0 || __builtin_add_overflow(offset, box.sizes[d], &end) ||
          __builtin_mul_overflow(bytes, box.sizes[d], &bytes)) {
        refuse(entry.name,
               "offset {} and size {} in dimension {}, expected none negative and sums and products below 2^63", offset,
               box.sizes[d], d);
      }
    }
  }

  void check_item(std::string_view name, const StoredItem& item, bool may_be_missing) const {
    if (item.file == StoredItem::kNoFile && may_be_missing) return;
    if (item.file >= metadata_.files.size() || item.transforms >= metadata_.transforms.size()) {
      refuse(name, "file {} and transforms {}, expected less than {} and {}", item.file, item.transforms,
             metadata_.files.size(), metadata_.transforms.size());
    }
    std::int64_t end = 0;
    if (item.offset_bytes < 0 || item.length_bytes < 0 ||
        __builtin_add_overflow(item.offset_bytes, item.length_bytes, &end)) {
      refuse(name, "offset {} and length {} in the file, expected none negative and their sum below 2^63",
             item.offset_bytes, item.length_bytes);
    }
  }

  static void check_path(std::string_view name, const Path& path) {
    for (const Key& item : path) {
      if (const auto* text = std::get_if<std::string>(&item)) check_text(name, *text);
    }
  }

  void check_paths() const {
    if (metadata_.paths && metadata_.paths->size() != metadata_.entries.size()) {
      fail(ErrorCode::invalid_argument, "write DCP metadata: {} paths for {} entries, expected as many",
           metadata_.paths->size(), metadata_.entries.size());
    }
    if (metadata_.paths) {
      for (std::size_t i = 0; i < metadata_.paths->size(); ++i) {
        check_path(metadata_.entries[i].name, (*metadata_.paths)[i]);
      }
    }
    std::unordered_set<std::string_view, TextHash> others;
    for (const UnclaimedPath& other : metadata_.unclaimed_paths) {
      check_text(other.name, other.name);
      check_path(other.name, other.path);
      if (!metadata_.paths || other.path.empty() || numbers_.contains(other.name) ||
          !others.insert(other.name).second) {
        refuse(other.name,
               "an unclaimed path, expected one that is not empty, of a name that is in none of the entries and "
               "once here, beside paths");
      }
    }
  }

  void check_unclaimed() const {
    std::set<std::pair<std::string_view, std::optional<std::vector<std::int64_t>>>> keys;
    std::unordered_map<std::size_t, OffsetIndex> indices;
    for (const UnclaimedItem& unclaimed : metadata_.unclaimed) {
      check_text(unclaimed.name, unclaimed.name);
      check_item(unclaimed.name, unclaimed.item, false);
      if (!keys.emplace(unclaimed.name, unclaimed.offsets).second) {
        refuse(unclaimed.name, "duplicate unclaimed item, expected unique items");
      }
      for (const std::int64_t offset : unclaimed.offsets.value_or(std::vector<std::int64_t>())) {
        if (offset < 0) refuse(unclaimed.name, "an unclaimed item at offset {}, expected 0 or more", offset);
      }
      const auto found = numbers_.find(unclaimed.name);
      if (!found) continue;
      const MetadataEntry& entry = metadata_.entries[*found];
      if (entry.is_tensor != unclaimed.offsets.has_value()) continue;
      if (!entry.is_tensor) refuse(unclaimed.name, "an unclaimed item is the object's, expected it in its entry");
      const bool has_rank = unclaimed.offsets->size() == entry.shape.size();
      const OffsetIndex& index = indices.try_emplace(*found, entry.chunks).first->second;
      if (!has_rank || index.find(*unclaimed.offsets)) {
        refuse(unclaimed.name, "an unclaimed item at offsets {} of shape {}, expected other offsets than the chunks'",
               shape_to_string(*unclaimed.offsets), shape_to_string(entry.shape));
      }
    }
  }

  void check_extras() const {
    using Fields = MetadataFields;
    if (metadata_.version && metadata_.dialect != Dialect::torch_2_14) {
      refuse("version", "'{}', expected none in a dialect other than torch_2_14", printable(*metadata_.version));
    }
    if (metadata_.version) check_text("version", *metadata_.version);
    std::set<std::string_view> names = {Fields::names[Fields::state_dict_metadata],
                                        Fields::names[Fields::storage_data]};
    for (const ExtraField& field : metadata_.extra) check_extra(field, names);
    if (!metadata_.storage_meta) {
      if (!metadata_.storage_meta_extra.empty()) {
        refuse(metadata_.storage_meta_extra[0].name,
               "an extra field of StorageMeta, expected none without storage_meta");
      }
      return;
    }
    const StorageMeta& meta = *metadata_.storage_meta;
    for (const auto* text : {&meta.checkpoint_id, &meta.save_id, &meta.load_id}) {
      if (*text) check_text("storage_meta", **text);
    }
    for (const std::string& module : meta.modules) check_text("storage_meta", module);
    names.clear();
    for (const ExtraField& field : metadata_.storage_meta_extra) check_extra(field, names);
  }

  static void check_extra(const ExtraField& field, std::set<std::string_view>& names) {
    check_text(field.name, field.name);
    if (!names.insert(field.name).second) refuse(field.name, "duplicate extra field, expected unique names");
  }

  const Metadata& metadata_;
  NameIndex numbers_;
};

}  // namespace

void check_writable(const Metadata& metadata) { Checker(metadata).run(); }

}  // namespace tessera::dcp
