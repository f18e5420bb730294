#include "checkpoint/save/files.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/checkpoint/internal/file_names.h"

namespace tessera::checkpoint {

FilePlan place_items(std::span<const ItemSize> items, std::size_t files) {
  FilePlan plan;
  plan.places.resize(items.size());
  std::uint64_t total = 0;
  for (const ItemSize& item : items) total += item.is_object ? 0 : item.bytes;
  const auto put = [&](std::size_t i, bool in_new_file) {
    if (in_new_file || plan.file_bytes.empty()) plan.file_bytes.push_back(0);
    plan.places[i] = {static_cast<std::uint32_t>(plan.file_bytes.size() - 1), plan.file_bytes.back()};
    plan.file_bytes.back() += items[i].bytes;
    plan.order.push_back(i);
  };
  std::uint64_t before = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (items[i].is_object) continue;
    // File f holds the items that begin in [f, f + 1) * total / files.
    const bool is_due = files != 0 && before >= plan.file_bytes.size() * (total / files);
    put(i, files == 0 || (is_due && plan.file_bytes.size() < files));
    before += items[i].bytes;
  }
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (items[i].is_object) put(i, files == 0);
  }
  return plan;
}

namespace {

// Replaces sizes and offsets by those of the items as they are stored, which stay in the same files and order.
void place_transformed(FilePlan& placed, std::vector<ItemSize>& sizes, std::span<const std::uint64_t> bytes) {
  if (bytes.size() != placed.order.size()) {
    fail(ErrorCode::internal, "place items: {} sizes of items with transforms, expected {}", bytes.size(),
         placed.order.size());
  }
  std::fill(placed.file_bytes.begin(), placed.file_bytes.end(), 0);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    FilePlan::Place& place = placed.places[placed.order[i]];
    place.offset_bytes = placed.file_bytes[place.file];
    placed.file_bytes[place.file] += bytes[i];
    sizes[placed.order[i]].bytes = bytes[i];
  }
}

}  // namespace

void place_rank(GlobalSavePlan& plan, std::size_t rank, std::size_t files, const WrittenSizes& written_sizes,
                std::uint32_t transforms, std::int64_t generation) {
  dcp::Metadata& metadata = plan.metadata;
  const std::vector<GlobalSavePlan::Written>& written = plan.written.at(rank);
  std::vector<ItemSize> sizes;
  sizes.reserve(written.size());
  std::size_t objects = 0;
  for (const GlobalSavePlan::Written& one : written) {
    if (metadata.entries[one.entry].is_tensor) {
      sizes.push_back({one.stored_bytes, false});
    } else if (objects < written_sizes.object_bytes.size()) {
      sizes.push_back({written_sizes.object_bytes[objects++], true});
    } else {
      fail(ErrorCode::internal, "place items of rank {}: found {} sizes of objects, expected more", rank, objects);
    }
  }
  FilePlan placed = place_items(sizes, files);
  if (transforms != 0) place_transformed(placed, sizes, written_sizes.transformed_bytes);
  const auto first_file = static_cast<std::uint32_t>(metadata.files.size());
  for (std::size_t f = 0; f < placed.file_bytes.size(); ++f) {
    metadata.files.push_back(
        to_string(DataFileName{static_cast<std::int64_t>(rank), static_cast<std::int64_t>(f), generation}));
  }
  for (std::size_t k = 0; k < written.size(); ++k) {
    dcp::StoredItem& item = metadata.entries[written[k].entry].items.at(written[k].chunk);
    item.file = first_file + placed.places[k].file;
    item.transforms = transforms;
    item.offset_bytes = static_cast<std::int64_t>(placed.places[k].offset_bytes);
    item.length_bytes = static_cast<std::int64_t>(sizes[k].bytes);
  }
}

}  // namespace tessera::checkpoint
