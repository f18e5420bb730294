#include "format/dcp/storage.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace tessera::dcp {

using pickle::Kind;
using pickle::NodeRef;

void StorageReader::read(NodeRef storage_data) {
  if (storage_data.is_none()) return;
  if (!storage_data.is(Kind::dict)) {
    input_.fail_at(ErrorCode::unsupported, {}, "storage_data", describe(storage_data), "a dict");
  }
  indices_.reserve(metadata_.entries.size());
  for (const MetadataEntry& entry : metadata_.entries) indices_.emplace_back(entry.chunks);
  for (const pickle::Pair& pair : storage_data.pairs()) place(pair.key, pair.value);
  share_equal_offsets();
  check_unclaimed();
  number_by_use();
}

void StorageReader::place(NodeRef key, NodeRef value) {
  const IndexRecord index = records_.index(key);
  const std::string_view name = index.fqn.string();
  const StoredItem item = read_item(value, name);
  const std::uint32_t number = number_of(index.fqn);
  StoredItem* place = nullptr;
  if (number != StringNumbers::kNone) {
    MetadataEntry& entry = metadata_.entries[number];
    if (!entry.is_tensor && !index.has_offset) place = &entry.items[0];
    if (entry.is_tensor && index.has_offset) place = destination(entry, number, index);
  }
  if (place == nullptr) {
    input_.charge(sizeof(UnclaimedItem) + name.size() + index.offset.size_bytes());
    UnclaimedItem unclaimed{std::string(name), std::nullopt, item};
    if (index.has_offset) unclaimed.offsets.emplace(index.offset.begin(), index.offset.end());
    metadata_.unclaimed.push_back(std::move(unclaimed));
    return;
  }
  if (place->file != StoredItem::kNoFile) {
    input_.fail_at(
        ErrorCode::corrupt, name, "storage_data",
        index.has_offset ? fmt::format("two items at offsets {}", shape_to_string(index.offset)) : "two items", "one");
  }
  *place = item;
}

// A rank's items are mostly in the order of the entries; their names need not be the same nodes.
std::uint32_t StorageReader::number_of(NodeRef name) {
  const bool is_next = next_entry_ < metadata_.entries.size() && metadata_.entries[next_entry_].name == name.string();
  const std::uint32_t number = is_next ? next_entry_ : names_.find(name);
  next_entry_ = number + 1;
  return number;
}

// Returns the item of the chunk that `index` refers to, or null if there is no such chunk.
StoredItem* StorageReader::destination(MetadataEntry& entry, std::size_t number, const IndexRecord& index) {
  if (index.offset.size() != entry.shape.size()) {
    input_.fail_at(ErrorCode::corrupt, entry.name, "storage_data",
                   fmt::format("an item at offsets {}", shape_to_string(index.offset)),
                   fmt::format("{} dimensions as in size {}", entry.shape.size(), shape_to_string(entry.shape)));
  }
  const std::optional<std::size_t> chunk =
      indices_[number].find(index.offset, static_cast<std::size_t>(index.position));
  return chunk ? &entry.items[*chunk] : nullptr;
}

StoredItem StorageReader::read_item(NodeRef value, std::string_view name) {
  const StorageRecord record = records_.storage(value, name);
  StoredItem item;
  item.offset_bytes = record.offset_bytes;
  item.length_bytes = record.length_bytes;
  const auto next = static_cast<std::uint32_t>(metadata_.files.size());
  item.file = files_.find_or_add(record.relative_path, next);
  if (item.file == next) metadata_.files.emplace_back(record.relative_path.string());
  item.transforms = read_transforms(record.transform_descriptors, name);
  return item;
}

std::uint32_t StorageReader::read_transforms(NodeRef value, std::string_view name) {
  if (value.is_none() || value.items().empty()) return 0;
  if (value.identity() == transforms_identity_) return transforms_number_;
  std::vector<std::string> descriptors;
  for (const NodeRef item : value.items()) {
    const std::string_view text = input_.string(item, name, "transform_descriptors");
    input_.charge(sizeof(std::string) + text.size());
    descriptors.emplace_back(text);
  }
  const auto next = static_cast<std::uint32_t>(metadata_.transforms.size());
  const auto [place, is_new] = transforms_.try_emplace(std::move(descriptors), next);
  if (is_new) metadata_.transforms.push_back(place->first);
  transforms_identity_ = value.identity();
  transforms_number_ = place->second;
  return transforms_number_;
}

void StorageReader::share_equal_offsets() {
  for (std::size_t i = 0; i < indices_.size(); ++i) {
    std::vector<StoredItem>& items = metadata_.entries[i].items;
    indices_[i].for_each_equal([&](std::size_t first, std::size_t other) { items[other] = items[first]; });
  }
}

void StorageReader::check_unclaimed() const {
  const std::vector<UnclaimedItem>& items = metadata_.unclaimed;
  std::vector<std::size_t> order(items.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto key = [&](std::size_t i) { return std::tie(items[i].name, items[i].offsets); };
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return key(a) < key(b); });
  for (std::size_t i = 1; i < order.size(); ++i) {
    if (key(order[i - 1]) != key(order[i])) continue;
    const UnclaimedItem& item = items[order[i]];
    input_.fail_at(ErrorCode::corrupt, item.name, "storage_data",
                   item.offsets ? fmt::format("two items at offsets {}", shape_to_string(*item.offsets)) : "two items",
                   "one");
  }
}

// Numbers files and transforms in the order in which the metadata's items use them, not of storage_data.
void StorageReader::number_by_use() {
  constexpr std::uint32_t kNew = UINT32_MAX;
  std::vector<std::uint32_t> file_numbers(metadata_.files.size(), kNew);
  std::vector<std::uint32_t> transform_numbers(metadata_.transforms.size(), kNew);
  std::vector<std::string> files;
  std::vector<std::vector<std::string>> transforms;
  files.reserve(metadata_.files.size());
  const auto renumber = [](std::uint32_t& number, std::vector<std::uint32_t>& numbers, auto& from, auto& to) {
    std::uint32_t& known = numbers[number];
    if (known == kNew) {
      known = static_cast<std::uint32_t>(to.size());
      to.push_back(std::move(from[number]));
    }
    number = known;
  };
  std::uint32_t none = 0;
  renumber(none, transform_numbers, metadata_.transforms, transforms);
  const auto renumber_item = [&](StoredItem& item) {
    if (item.file == StoredItem::kNoFile) return;
    renumber(item.file, file_numbers, metadata_.files, files);
    renumber(item.transforms, transform_numbers, metadata_.transforms, transforms);
  };
  for (MetadataEntry& entry : metadata_.entries) {
    for (StoredItem& item : entry.items) renumber_item(item);
  }
  for (UnclaimedItem& unclaimed : metadata_.unclaimed) renumber_item(unclaimed.item);
  metadata_.files = std::move(files);
  metadata_.transforms = std::move(transforms);
}

}  // namespace tessera::dcp
