#pragma once
// Assigns a rank's items to files and offsets.

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/checkpoint/global_save_plan.h"

namespace tessera::checkpoint {

struct ItemSize {
  std::uint64_t bytes = 0;  // stored
  bool is_object = false;
};

struct FilePlan {
  struct Place {
    std::uint32_t file = 0;
    std::uint64_t offset_bytes = 0;
  };
  std::vector<Place> places;  // of each item
  std::vector<std::uint64_t> file_bytes;
  // Items in the order of writing: by file, then by offset.
  std::vector<std::size_t> order;
};

// Places the items of one rank; the coordinator computes the same result. Tensors go in order into `files` files of
// about equal size (0: one file per item). Objects follow them in the last file, because their sizes may change between
// saves of the same layout.
FilePlan place_items(std::span<const ItemSize> items, std::size_t files);

// The sizes that are known only to the rank that wrote the items; see RankReport.
struct WrittenSizes {
  std::span<const std::uint64_t> object_bytes, transformed_bytes;
};

// Records in the metadata where the items that `rank` writes are stored. `transforms` is the index of their transforms
// in the metadata.
void place_rank(GlobalSavePlan& plan, std::size_t rank, std::size_t files, const WrittenSizes& written,
                std::uint32_t transforms, std::int64_t generation);

}  // namespace tessera::checkpoint
