#include "tessera/layout/shard_metadata.h"

#include <algorithm>
#include <ostream>
#include <tuple>
#include <utility>

#include "tessera/base/checked.h"
#include "tessera/base/error.h"
#include "tessera/layout/coverage.h"
#include "tessera/layout/redistribution.h"

namespace tessera {

namespace {

using Pair = std::optional<std::pair<std::size_t, std::size_t>>;

std::int64_t end_of(const ShardMetadata& shard, std::size_t dim) {
  return checked_add(shard.shard_offsets[dim], shard.shard_sizes[dim], "end of a shard");
}

// Returns the dimensions in which the shards differ.
std::vector<std::size_t> sharded_dims(std::span<const ShardMetadata> shards) {
  std::vector<std::size_t> dims;
  for (std::size_t d = 0; d < shards[0].rank(); ++d) {
    const bool differs = std::any_of(shards.begin(), shards.end(), [&](const ShardMetadata& shard) {
      return shard.shard_offsets[d] != shards[0].shard_offsets[d] || shard.shard_sizes[d] != shards[0].shard_sizes[d];
    });
    if (differs) dims.push_back(d);
  }
  return dims;
}

// For shards split in one dimension, comparing neighbors is enough.
Pair find_overlap_in(std::span<const ShardMetadata> shards, std::size_t dim) {
  struct ShardInterval {
    std::int64_t begin, end;
    std::size_t shard;
  };
  std::vector<ShardInterval> intervals;
  intervals.reserve(shards.size());
  for (std::size_t i = 0; i < shards.size(); ++i) {
    intervals.push_back({shards[i].shard_offsets[dim], end_of(shards[i], dim), i});
  }
  const auto before = [](const ShardInterval& a, const ShardInterval& b) {
    return std::tie(a.begin, a.end, a.shard) < std::tie(b.begin, b.end, b.shard);
  };
  // Shards are usually in order already.
  if (!std::is_sorted(intervals.begin(), intervals.end(), before)) {
    std::sort(intervals.begin(), intervals.end(), before);
  }
  for (std::size_t i = 1; i < intervals.size(); ++i) {
    if (intervals[i - 1].end > intervals[i].begin) return std::pair(intervals[i - 1].shard, intervals[i].shard);
  }
  return std::nullopt;
}

// Returns whether each shard begins before the end of the other in each of `dims`.
bool meet(const ShardMetadata& a, const ShardMetadata& b, std::span<const std::size_t> dims) {
  return std::all_of(dims.begin(), dims.end(), [&](std::size_t d) {
    return a.shard_offsets[d] < end_of(b, d) && b.shard_offsets[d] < end_of(a, d);
  });
}

// Returns the box of `shard` in the dimensions `dims`.
Box box_in(const ShardMetadata& shard, std::span<const std::size_t> dims) {
  Box box;
  for (const std::size_t d : dims) {
    box.offsets.push_back(shard.shard_offsets[d]);
    box.sizes.push_back(shard.shard_sizes[d]);
  }
  return box;
}

// Extends each empty side by the element before it. A shard that an empty shard is strictly inside of contains this
// element, so the index finds the pairs.
Pair find_overlap_with_empty(std::span<const ShardMetadata> shards, std::span<const std::size_t> dims,
                             std::span<const std::size_t> empty) {
  BoxList stretched(dims.size());
  stretched.reserve(shards.size());
  for (const ShardMetadata& shard : shards) {
    Box box = box_in(shard, dims);
    for (std::size_t i = 0; i < dims.size(); ++i) {
      if (box.sizes[i] != 0 || box.offsets[i] == 0) continue;
      --box.offsets[i];
      box.sizes[i] = 1;
    }
    stretched.push_back(box);
  }
  const BoxIndex index(stretched);
  for (const std::size_t i : empty) {
    for (const std::size_t other : index.overlapping(stretched[i])) {
      if (other != i && meet(shards[i], shards[other], dims)) return std::minmax(i, other);
    }
  }
  return std::nullopt;
}

// Shards that are not empty overlap if their boxes do.
Pair find_overlap_in(std::span<const ShardMetadata> shards, std::span<const std::size_t> dims) {
  BoxList boxes(dims.size());
  boxes.reserve(shards.size());
  std::vector<std::size_t> empty;
  Box box(std::vector<std::int64_t>(dims.size()), std::vector<std::int64_t>(dims.size()));
  for (const ShardMetadata& shard : shards) {
    for (std::size_t i = 0; i < dims.size(); ++i) {
      end_of(shard, dims[i]);
      box.offsets[i] = shard.shard_offsets[dims[i]];
      box.sizes[i] = shard.shard_sizes[dims[i]];
    }
    boxes.push_back(box);
    if (is_empty(box)) empty.push_back(boxes.size() - 1);
  }
  if (const Pair found = find_overlap(boxes)) return found;
  return empty.empty() ? std::nullopt : find_overlap_with_empty(shards, dims, empty);
}

}  // namespace

ShardMetadata::ShardMetadata(std::vector<std::int64_t> offsets, std::vector<std::int64_t> sizes,
                             std::optional<RemoteDevice> placement_in)
    : shard_offsets(std::move(offsets)), shard_sizes(std::move(sizes)), placement(std::move(placement_in)) {
  if (shard_offsets.size() != shard_sizes.size()) {
    fail(ErrorCode::invalid_argument, "shard with offsets {} and sizes {}: expected as many offsets as sizes",
         shape_to_string(shard_offsets), shape_to_string(shard_sizes));
  }
  const auto is_negative = [](std::int64_t n) { return n < 0; };
  if (std::any_of(shard_offsets.begin(), shard_offsets.end(), is_negative) ||
      std::any_of(shard_sizes.begin(), shard_sizes.end(), is_negative)) {
    fail(ErrorCode::invalid_argument, "shard with offsets {} and sizes {}: expected no negative value",
         shape_to_string(shard_offsets), shape_to_string(shard_sizes));
  }
}

std::string to_string(const ShardMetadata& shard) {
  const std::string box = to_string(shard.box());
  return shard.placement ? fmt::format("{} on {}", box, to_string(*shard.placement)) : box;
}

std::ostream& operator<<(std::ostream& out, const ShardMetadata& shard) { return out << to_string(shard); }

std::string to_string(const ShardedTensorMetadata& metadata) {
  std::string text = fmt::format("{} of {}", shape_to_string(metadata.size), to_string(metadata.tensor_properties));
  for (const ShardMetadata& shard : metadata.shards_metadata) text += "\n  " + to_string(shard);
  return text;
}

std::string comparable_text(const ShardedTensorMetadata& metadata) {
  ShardedTensorMetadata without_indices = metadata;
  for (ShardMetadata& shard : without_indices.shards_metadata) {
    if (shard.placement) shard.placement = shard.placement->without_index();
  }
  return to_string(without_indices);
}

void validate_non_overlapping(std::span<const ShardMetadata> shards) {
  if (shards.size() < 2) return;
  for (const ShardMetadata& shard : shards) {
    if (shard.rank() != shards[0].rank()) {
      fail(ErrorCode::invalid_argument, "shards {} and {}: expected the same number of dimensions",
           to_string(shards[0]), to_string(shard));
    }
  }
  const std::vector<std::size_t> dims = sharded_dims(shards);
  Pair found;
  if (dims.empty()) {
    // All shards are the same box.
    const BoxView box = shards[0].box();
    const bool begins_at_0 =
        std::all_of(box.offsets.begin(), box.offsets.end(), [](std::int64_t offset) { return offset == 0; });
    if (is_empty(box) && begins_at_0) return;
    found = {0, 1};
  } else if (dims.size() == 1) {
    found = find_overlap_in(shards, dims[0]);
  } else {
    found = find_overlap_in(shards, dims);
  }
  if (!found) return;
  fail(ErrorCode::invalid_argument, "shards {} and {} overlap, expected shards without common elements",
       to_string(shards[found->first]), to_string(shards[found->second]));
}

void check_tensor(std::span<const ShardMetadata> shards, std::span<const std::int64_t> size) {
  if (shards.empty()) {
    fail(ErrorCode::invalid_argument, "tensor of size {}: found no shards, expected at least one shard",
         shape_to_string(size));
  }
  const std::int64_t volume = checked_numel(size, "a tensor");
  std::int64_t volume_of_shards = 0;
  for (const ShardMetadata& shard : shards) {
    if (shard.rank() != size.size()) {
      fail(ErrorCode::invalid_argument, "tensor of size {}: shard {} has {} dimensions, expected {}",
           shape_to_string(size), to_string(shard), shard.rank(), size.size());
    }
    for (std::size_t d = 0; d < size.size(); ++d) {
      if (end_of(shard, d) <= size[d]) continue;
      fail(ErrorCode::invalid_argument, "tensor of size {}: shard {} ends at {} in dimension {}, expected at most {}",
           shape_to_string(size), to_string(shard), end_of(shard, d), d, size[d]);
    }
    volume_of_shards = checked_add(volume_of_shards, checked_numel(shard.shard_sizes, "a shard"), "volume of shards");
  }
  if (volume_of_shards == volume) return;
  BoxList boxes(size.size());
  for (const ShardMetadata& shard : shards) boxes.push_back(shard.box());
  const std::optional<Box> hole = find_hole(size, boxes);
  fail(ErrorCode::invalid_argument, "tensor of size {}: the shards have {} elements, expected {}{}",
       shape_to_string(size), volume_of_shards, volume, hole ? fmt::format("; no shard has {}", to_string(*hole)) : "");
}

}  // namespace tessera
