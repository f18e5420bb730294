#pragma once
// Which of a rank's items goes where in which of its files.

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
  // Items in the order in which they are written: by file, then by offset.
  std::vector<std::size_t> order;
};

// Of what one rank writes, which rank 0 works out as well. Tensors go in order into `files` files (0: each item has its
// own), about equal in bytes; objects, whose sizes may change while the state's layout doesn't, behind them in the
// last.
FilePlan place_items(std::span<const ItemSize> items, std::size_t files);

// Says in the metadata where the items that `rank` writes are. `object_bytes` are those of its objects, in order.
void place_rank(GlobalSavePlan& plan, std::size_t rank, std::size_t files, std::span<const std::uint64_t> object_bytes,
                std::int64_t generation);

}  // namespace tessera::checkpoint
