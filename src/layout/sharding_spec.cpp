#include "tessera/layout/sharding_spec.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "tessera/base/error.h"

namespace tessera {

namespace {

// Returns the rows of a full chunk. `chunks` > 0.
std::int64_t chunk_rows(std::int64_t rows, std::int64_t chunks) { return rows / chunks + (rows % chunks != 0 ? 1 : 0); }

std::int64_t rows_of_chunk(std::int64_t rows, std::int64_t rows_each, std::int64_t chunk) {
  return std::clamp<std::int64_t>(rows - chunk * rows_each, 0, rows_each);
}

// Returns the only dimension in which some shard has an offset other than 0; nothing if there are several, or none.
std::optional<std::size_t> only_offset_dim(std::span<const ShardMetadata> shards) {
  std::optional<std::size_t> dim;
  for (const ShardMetadata& shard : shards) {
    for (std::size_t d = 0; d < shard.rank(); ++d) {
      if (shard.shard_offsets[d] == 0) continue;
      if (dim && *dim != d) return std::nullopt;
      dim = d;
    }
  }
  return dim;
}

template <typename T>
std::string join(const std::vector<T>& values) {
  std::string text;
  for (const T& value : values) text += (text.empty() ? "" : ", ") + tessera::to_string(value);
  return text;
}

std::string chunks_text(std::int64_t dim, const std::vector<RemoteDevice>& placements) {
  return fmt::format("ChunkShardingSpec(dim={}, placements=[{}])", dim, join(placements));
}

std::string shards_text(const std::vector<ShardMetadata>& shards) {
  return fmt::format("EnumerableShardingSpec(shards=[{}])", join(shards));
}

}  // namespace

std::string comparable_text(const ShardingSpec& spec) {
  if (const auto* chunk = dynamic_cast<const ChunkShardingSpec*>(&spec)) {
    std::vector<RemoteDevice> placements = chunk->placements();
    for (RemoteDevice& placement : placements) placement = placement.without_index();
    return chunks_text(chunk->dim(), placements);
  }
  if (const auto* enumerable = dynamic_cast<const EnumerableShardingSpec*>(&spec)) {
    std::vector<ShardMetadata> shards = enumerable->shards();
    for (ShardMetadata& shard : shards) {
      if (shard.placement) shard.placement = shard.placement->without_index();
    }
    return shards_text(shards);
  }
  return spec.to_string();
}

ChunkShardingSpec::ChunkShardingSpec(std::int64_t dim, std::vector<RemoteDevice> placements)
    : dim_(dim), placements_(std::move(placements)) {
  if (placements_.empty()) {
    fail(ErrorCode::invalid_argument,
         "ChunkShardingSpec of dimension {}: found no placements, expected at least one placement", dim);
  }
}

ShardedTensorMetadata ChunkShardingSpec::build_metadata(std::span<const std::int64_t> size,
                                                        const TensorProperties& properties) const {
  const auto rank = static_cast<std::int64_t>(size.size());
  if (dim_ >= rank || dim_ < -rank) {
    fail(ErrorCode::invalid_argument, "ChunkShardingSpec of dimension {} on size {}: expected one of its {} dimensions",
         dim_, shape_to_string(size), rank);
  }
  const auto d = static_cast<std::size_t>(dim_ < 0 ? dim_ + rank : dim_);
  const std::int64_t rows_each = chunk_rows(size[d], static_cast<std::int64_t>(placements_.size()));
  ShardedTensorMetadata metadata;
  metadata.size.assign(size.begin(), size.end());
  metadata.tensor_properties = properties;
  metadata.shards_metadata.reserve(placements_.size());
  for (std::size_t i = 0; i < placements_.size(); ++i) {
    const auto chunk = static_cast<std::int64_t>(i);
    std::vector<std::int64_t> offsets(size.size(), 0), sizes = metadata.size;
    offsets[d] = chunk * rows_each;
    sizes[d] = rows_of_chunk(size[d], rows_each, chunk);
    metadata.shards_metadata.emplace_back(std::move(offsets), std::move(sizes), placements_[i]);
  }
  return metadata;
}

bool ChunkShardingSpec::equals(const ShardingSpec& other) const {
  const auto* chunk = dynamic_cast<const ChunkShardingSpec*>(&other);
  return chunk != nullptr && chunk->dim_ == dim_ && chunk->placements_ == placements_;
}

std::string ChunkShardingSpec::to_string() const { return chunks_text(dim_, placements_); }

EnumerableShardingSpec::EnumerableShardingSpec(std::vector<ShardMetadata> shards) : shards_(std::move(shards)) {
  if (shards_.empty())
    fail(ErrorCode::invalid_argument, "EnumerableShardingSpec: found no shards, expected at least one shard");
  validate_non_overlapping(shards_);
}

ShardedTensorMetadata EnumerableShardingSpec::build_metadata(std::span<const std::int64_t> size,
                                                             const TensorProperties& properties) const {
  check_tensor(shards_, size);
  return {shards_, {size.begin(), size.end()}, properties};
}

bool EnumerableShardingSpec::equals(const ShardingSpec& other) const {
  const auto* enumerable = dynamic_cast<const EnumerableShardingSpec*>(&other);
  return enumerable != nullptr && enumerable->shards_ == shards_;
}

std::string EnumerableShardingSpec::to_string() const { return shards_text(shards_); }

std::shared_ptr<const ShardingSpec> infer_sharding_spec(std::span<const ShardMetadata> shards) {
  const auto enumerable = [&] {
    return std::make_shared<EnumerableShardingSpec>(std::vector<ShardMetadata>(shards.begin(), shards.end()));
  };
  const std::optional<std::size_t> dim = only_offset_dim(shards);
  const bool have_dim =
      dim && std::all_of(shards.begin(), shards.end(), [&](const ShardMetadata& shard) { return *dim < shard.rank(); });
  if (!have_dim) return enumerable();

  std::vector<std::size_t> order(shards.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto begins_before = [&](std::size_t a, std::size_t b) {
    return shards[a].shard_offsets[*dim] < shards[b].shard_offsets[*dim];
  };
  if (!std::is_sorted(order.begin(), order.end(), begins_before)) {  // they are usually in order already
    std::stable_sort(order.begin(), order.end(), begins_before);
  }
  std::int64_t rows = 0;
  for (const ShardMetadata& shard : shards) {
    if (__builtin_add_overflow(rows, shard.shard_sizes[*dim], &rows)) return enumerable();
  }
  const std::int64_t rows_each = chunk_rows(rows, static_cast<std::int64_t>(shards.size()));
  std::vector<RemoteDevice> placements;
  placements.reserve(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    const ShardMetadata& shard = shards[order[i]];
    const auto chunk = static_cast<std::int64_t>(i);
    if (shard.shard_offsets[*dim] != chunk * rows_each ||
        shard.shard_sizes[*dim] != rows_of_chunk(rows, rows_each, chunk)) {
      return enumerable();
    }
    if (!shard.placement) {
      fail(ErrorCode::invalid_argument,
           "infer the sharding spec of {} shards: {} has no placement, expected one for each shard", shards.size(),
           tessera::to_string(shard));
    }
    placements.push_back(*shard.placement);
  }
  return std::make_shared<ChunkShardingSpec>(static_cast<std::int64_t>(*dim), std::move(placements));
}

}  // namespace tessera
