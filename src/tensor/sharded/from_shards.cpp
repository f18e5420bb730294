// Creates a ShardedTensor from existing shards: each rank checks its own, then the ranks' shards are merged.

#include <c10/util/StringUtil.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "tensor/dtensor/placement.h"
#include "tensor/sharded/state.h"
#include "tessera/base/error.h"
#include "tessera/tensor/from_chunks.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

namespace {

using nlohmann::json;
using Sizes = std::vector<std::int64_t>;

std::string text_of(bool value) { return value ? "true" : "false"; }

// `what` and `whose` are for messages.
void require_same(const std::string& found, const std::string& expected, std::string_view what,
                  std::string_view whose) {
  if (found == expected) return;
  fail(ErrorCode::invalid_argument, "{}: {} {}, expected {}", whose, what, found, expected);
}

void check_contiguous(const Shard& shard, std::string_view whose) {
  if (shard.tensor.layout() != at::kStrided) {
    fail(ErrorCode::invalid_argument, "{}: layout {}, expected torch.strided", whose, c10::str(shard.tensor.layout()));
  }
  if (!shard.tensor.is_contiguous()) {
    fail(ErrorCode::invalid_argument, "{}: the tensor is not contiguous, expected torch.contiguous_format", whose);
  }
}

void check_defined(const Shard& shard, const ProcessGroup& group) {
  if (shard.tensor.defined()) return;
  fail(ErrorCode::invalid_argument, "shard {} on rank {}: the tensor is undefined, expected a tensor",
       to_string(shard.metadata), group.rank());
}

}  // namespace

void check_shard(const Shard& shard, const TensorProperties& expected, const ProcessGroup& group) {
  check_defined(shard, group);
  const std::string whose = fmt::format("shard {} on rank {}", to_string(shard.metadata), group.rank());
  check_contiguous(shard, whose);
  if (const int rank = rank_of(shard.metadata, group); rank != group.rank()) {
    fail(ErrorCode::invalid_argument, "{}: its placement is on rank {}, expected rank {}", whose, rank, group.rank());
  }
  const TensorProperties found = properties_of(shard.tensor);
  require_same(to_string(to_device(shard.tensor.device())), to_string(shard.metadata.placement->device()), "device",
               whose);
  require_same(shape_to_string(shard.tensor.sizes().vec()), shape_to_string(shard.metadata.shard_sizes), "size", whose);
  require_same(std::string(dtype_name(found.dtype)), std::string(dtype_name(expected.dtype)), "dtype", whose);
  require_same(text_of(found.requires_grad), text_of(expected.requires_grad), "requires_grad", whose);
  require_same(text_of(found.pin_memory), text_of(expected.pin_memory), "pin_memory", whose);
}

namespace {

json to_json(const std::vector<Shard>& shards, const Sizes& size) {
  json result = {{"size", size}, {"shards", json::array()}};
  for (const Shard& shard : shards) {
    result["shards"].push_back(
        {shard.metadata.shard_offsets, shard.metadata.shard_sizes, to_string(*shard.metadata.placement)});
  }
  if (!shards.empty()) {
    const TensorProperties properties = properties_of(shards[0].tensor);
    result["dtype"] = dtype_name(properties.dtype);
    result["requires_grad"] = properties.requires_grad;
    result["pin_memory"] = properties.pin_memory;
  }
  return result;
}

// Merges the ranks' descriptions into one. Errors about a difference name both ranks.
ShardedTensorMetadata merge(const std::vector<Bytes>& descriptions) {
  ShardedTensorMetadata merged;
  json first;
  std::size_t first_rank = 0;
  for (std::size_t rank = 0; rank < descriptions.size(); ++rank) {
    const json mine = json::parse(descriptions[rank].begin(), descriptions[rank].end());
    if (mine.at("shards").empty()) continue;
    if (first.is_null()) {
      first = mine;
      first_rank = rank;
    }
    for (const char* what : {"size", "dtype", "requires_grad", "pin_memory"}) {
      if (mine.at(what) == first.at(what)) continue;
      fail(ErrorCode::invalid_argument,
           "sharded tensor from local shards: {} is {} on rank {} and {} on rank {}, expected the same on all ranks",
           what, first.at(what).dump(), first_rank, mine.at(what).dump(), rank);
    }
    for (const json& shard : mine.at("shards")) {
      merged.shards_metadata.emplace_back(shard[0].get<Sizes>(), shard[1].get<Sizes>(),
                                          RemoteDevice(shard[2].get<std::string>()));
    }
  }
  if (first.is_null()) {
    fail(ErrorCode::invalid_argument, "sharded tensor from local shards: no rank has any, expected at least one shard");
  }
  merged.size = first.at("size").get<Sizes>();
  merged.tensor_properties.dtype = dtype_from_name(first.at("dtype").get<std::string>());
  merged.tensor_properties.requires_grad = first.at("requires_grad");
  merged.tensor_properties.pin_memory = first.at("pin_memory");
  try {
    validate_non_overlapping(merged.shards_metadata);
    check_tensor(merged.shards_metadata, merged.size);
  } catch (const Error& error) {
    fail(error.code(), "sharded tensor from local shards: {}", error.what());
  }
  return merged;
}

}  // namespace

ShardedTensor ShardedTensor::from_local_shards(std::vector<Shard> local_shards, const Sizes& size,
                                               const ProcessGroup& group, bool init_rrefs) {
  group.check_call("sharded tensor from local shards", [&](CallArguments& arguments) {
    require_rpc(init_rrefs);
    if (!local_shards.empty()) check_defined(local_shards[0], group);
    for (const Shard& shard : local_shards) check_shard(shard, properties_of(local_shards[0].tensor), group);
    arguments.add("init_rrefs", init_rrefs);
  });
  const std::string mine = to_json(local_shards, size).dump();
  auto state = std::make_shared<State>();
  state->metadata = merge(group.all_gather_bytes(as_bytes(mine)));
  state->spec = infer_sharding_spec(state->metadata.shards_metadata);
  state->group = group;
  state->local_shards = std::move(local_shards);
  state->init_rrefs = init_rrefs;
  return finish(std::move(state));
}

ShardedTensor sharded_tensor_from_chunks(const at::Tensor& chunk, std::int64_t dim, const ProcessGroup& group,
                                         bool init_rrefs) {
  constexpr char kWhat[] = "sharded tensor from local chunks";
  group.check_call(kWhat, [&](CallArguments& arguments) {
    require_rpc(init_rrefs);
    if (!chunk.defined()) fail(ErrorCode::invalid_argument, "the chunk is undefined, expected a tensor");
    if (dim < 0 || dim >= chunk.dim()) {
      fail(ErrorCode::invalid_argument, "dimension {} of a chunk of shape {}, expected a dimension of it, from 0", dim,
           shape_to_string(chunk.sizes().vec()));
    }
    arguments.add("dim", dim).add("dimensions", chunk.dim()).add("init_rrefs", init_rrefs);
  });
  Bytes mine;
  for (const std::int64_t size : chunk.sizes()) append_little_endian(mine, static_cast<std::uint64_t>(size));
  const auto place = static_cast<std::size_t>(dim);
  Sizes full, offsets(static_cast<std::size_t>(chunk.dim()), 0);
  const std::vector<Bytes> all = group.all_gather_bytes(mine);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    Sizes sizes;
    for (std::size_t at = 0; at < all[rank].size(); at += sizeof(std::uint64_t)) {
      sizes.push_back(static_cast<std::int64_t>(load_little_endian<std::uint64_t>(all[rank].data() + at)));
    }
    if (rank == 0) {
      full = sizes;
      full[place] = 0;
    }
    if (static_cast<int>(rank) == group.rank()) offsets[place] = full[place];
    const std::int64_t length = std::exchange(sizes[place], full[place]);
    if (sizes != full) {
      sizes[place] = length;
      fail(ErrorCode::invalid_argument,
           "{}: the chunk of rank {} has shape {}, expected that of rank 0 except for dimension {}", kWhat, rank,
           shape_to_string(sizes), dim);
    }
    full[place] += length;
  }
  return ShardedTensor::from_local_shards({Shard::from_tensor_and_offsets(chunk, std::move(offsets), group.rank())},
                                          full, group, init_rrefs);
}

ShardedTensor ShardedTensor::from_local_tensor(const at::Tensor& tensor, SpecPtr spec, Sizes size,
                                               const ProcessGroup& group, bool init_rrefs) {
  return finish(construct(group, init_rrefs, [&] {
    if (!tensor.defined()) {
      fail(ErrorCode::invalid_argument,
           "sharded tensor from the local tensor of rank {}: it is undefined, expected a tensor", group.rank());
    }
    if (!tensor.is_contiguous()) {
      fail(ErrorCode::invalid_argument,
           "sharded tensor from the local tensor of rank {}: it is not contiguous, expected a contiguous tensor",
           group.rank());
    }
    ShardedTensorMetadata metadata = metadata_by(spec, size, properties_of(tensor));
    std::vector<Shard> mine;
    for (const ShardMetadata& shard : metadata.shards_metadata) {
      if (rank_of(shard, group) == group.rank()) mine.push_back({tensor, shard});
    }
    if (mine.size() != 1) {
      fail(ErrorCode::invalid_argument,
           "sharded tensor from the local tensor of rank {}: the spec places {} shards on this rank, expected one",
           group.rank(), mine.size());
    }
    check_shard(mine[0], metadata.tensor_properties, group);
    check_partition(metadata, "shard");
    auto state = std::make_shared<State>();
    state->spec = std::move(spec);
    state->group = group;
    state->metadata = std::move(metadata);
    state->local_shards = std::move(mine);
    state->init_rrefs = init_rrefs;
    return state;
  }));
}

void check_local_shards(std::string_view whose, const std::vector<Shard>& local_shards,
                        const std::vector<ShardMetadata>& all, const ProcessGroup& group) {
  const auto mine = shards_by_rank(all, group)[static_cast<std::size_t>(group.rank())];
  if (mine.size() != local_shards.size()) {
    fail(ErrorCode::invalid_argument, "{}: rank {} has {} local shards, expected {} as in the metadata", whose,
         group.rank(), local_shards.size(), mine.size());
  }
  for (std::size_t i = 0; i < mine.size(); ++i) {
    if (local_shards[i].metadata == all[mine[i]]) continue;
    fail(ErrorCode::invalid_argument, "{}: local shard {} of rank {} is {}, expected {} as in the metadata", whose, i,
         group.rank(), to_string(local_shards[i].metadata), to_string(all[mine[i]]));
  }
}

ShardedTensor ShardedTensor::from_local_shards_and_global_metadata(std::vector<Shard> local_shards,
                                                                   ShardedTensorMetadata metadata,
                                                                   const ProcessGroup& group, SpecPtr spec,
                                                                   bool init_rrefs) {
  return finish(construct(group, init_rrefs, [&] {
    if (metadata.shards_metadata.empty()) {
      fail(ErrorCode::invalid_argument, "sharded tensor of size {}: its metadata has no shards, expected at least one",
           shape_to_string(metadata.size));
    }
    if (metadata.tensor_properties.layout != "torch.strided") {
      fail(ErrorCode::invalid_argument, "sharded tensor of size {}: layout {}, expected torch.strided",
           shape_to_string(metadata.size), printable(metadata.tensor_properties.layout));
    }
    for (const Shard& shard : local_shards) check_shard(shard, metadata.tensor_properties, group);
    check_local_shards(fmt::format("sharded tensor of size {}", shape_to_string(metadata.size)), local_shards,
                       metadata.shards_metadata, group);
    validate_non_overlapping(metadata.shards_metadata);
    check_tensor(metadata.shards_metadata, metadata.size);
    auto state = std::make_shared<State>();
    state->spec = spec ? std::move(spec) : infer_sharding_spec(metadata.shards_metadata);
    state->group = group;
    state->metadata = std::move(metadata);
    state->local_shards = std::move(local_shards);
    state->init_rrefs = init_rrefs;
    return state;
  }));
}

ShardedTensor ShardedTensor::with_local_tensors(const std::vector<at::Tensor>& tensors, at::ScalarType dtype,
                                                bool requires_grad, bool pin_memory) const {
  return finish(construct(process_group(), init_rrefs(), [&] {
    if (tensors.size() != local_shards().size()) {
      fail(ErrorCode::invalid_argument, "sharded tensor of size {} on rank {}: {} local tensors, expected {}",
           shape_to_string(size()), process_group().rank(), tensors.size(), local_shards().size());
    }
    auto state = std::make_shared<State>();
    state->group = process_group();
    state->spec = shared_spec();
    state->init_rrefs = init_rrefs();
    state->metadata = metadata();
    state->metadata.tensor_properties.dtype = to_dtype(dtype);
    state->metadata.tensor_properties.requires_grad = requires_grad;
    state->metadata.tensor_properties.pin_memory = pin_memory;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      state->local_shards.push_back({tensors[i], local_shards()[i].metadata});
      check_shard(state->local_shards.back(), state->metadata.tensor_properties, process_group());
    }
    return state;
  }));
}

}  // namespace tessera
