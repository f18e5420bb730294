#include <ATen/ops/empty.h>

#include <numeric>

#include "tensor/box_view.h"
#include "tensor/placement.h"
#include "tensor/sharded_tensor_state.h"
#include "tessera/base/error.h"
#include "tessera/layout/redistribution.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

namespace {

// Of each shard, which of its rank's local shards it is.
std::vector<std::size_t> local_indices(const std::vector<std::vector<std::size_t>>& by_rank, std::size_t shards) {
  std::vector<std::size_t> indices(shards);
  for (const std::vector<std::size_t>& of_rank : by_rank) {
    for (std::size_t i = 0; i < of_rank.size(); ++i) indices[of_rank[i]] = i;
  }
  return indices;
}

}  // namespace

void ShardedTensor::reshard(SpecPtr spec) {
  if (*spec == sharding_spec()) return;
  const ProcessGroup& group = process_group();
  ShardedTensorMetadata target = spec->build_metadata(size(), metadata().tensor_properties);
  check_partition(target, "reshard");
  const std::vector<ShardMetadata>& from = metadata().shards_metadata;
  const std::vector<ShardMetadata>& to = target.shards_metadata;
  const auto from_by_rank = shards_by_rank(from, group), to_by_rank = shards_by_rank(to, group);
  const std::vector<std::size_t> from_local = local_indices(from_by_rank, from.size());
  const std::vector<std::size_t> to_local = local_indices(to_by_rank, to.size());
  const auto me = static_cast<std::size_t>(group.rank());

  std::vector<Shard> resharded;
  for (const std::size_t i : to_by_rank[me]) {
    const at::TensorOptions options = at::TensorOptions()
                                          .dtype(scalar_type())
                                          .device(to_device(to[i].placement->device()))
                                          .pinned_memory(is_pinned());
    resharded.push_back({at::empty(to[i].shard_sizes, options), to[i]});
  }

  // By the other rank, in the order of the plan, which is the same on all ranks.
  struct Piece {
    at::Tensor here;  // a view
    std::int64_t count;
  };
  std::vector<std::vector<Piece>> sent(from_by_rank.size()), received(from_by_rank.size());
  for (const Transfer& transfer : plan_redistribution(boxes_of(from, size().size()), boxes_of(to, size().size()))) {
    const auto source = static_cast<std::size_t>(rank_of(from[transfer.source], group));
    const auto destination = static_cast<std::size_t>(rank_of(to[transfer.destination], group));
    if (source != me && destination != me) continue;
    at::Tensor taken, given;
    if (source == me) {
      taken = box_view(local_shards()[from_local[transfer.source]].tensor.detach(), from[transfer.source].box(),
                       transfer.box);
    }
    if (destination == me) {
      given = box_view(resharded[to_local[transfer.destination]].tensor, to[transfer.destination].box(), transfer.box);
    }
    if (source == destination) {
      given.copy_(taken);
    } else if (source == me) {
      sent[destination].push_back({taken, volume(transfer.box)});
    } else {
      received[source].push_back({given, volume(transfer.box)});
    }
  }

  const auto splits_of = [](const std::vector<std::vector<Piece>>& pieces) {
    std::vector<std::int64_t> splits;
    splits.reserve(pieces.size());
    for (const std::vector<Piece>& of_rank : pieces) {
      splits.push_back(std::accumulate(of_rank.begin(), of_rank.end(), std::int64_t{0},
                                       [](std::int64_t sum, const Piece& piece) { return sum + piece.count; }));
    }
    return splits;
  };
  // A single piece that is contiguous is sent from and received into where it is.
  const auto buffer_for = [&](const std::vector<std::vector<Piece>>& pieces, std::int64_t count) {
    const Piece* only = nullptr;
    std::size_t number = 0;
    for (const std::vector<Piece>& of_rank : pieces) {
      number += of_rank.size();
      if (!of_rank.empty()) only = &of_rank[0];
    }
    if (number == 1 && only->here.is_contiguous()) return only->here.view({-1});
    const at::Device device = only != nullptr ? only->here.device() : at::Device(at::kCPU);
    return at::empty({count}, at::TensorOptions().dtype(scalar_type()).device(device));
  };
  const auto each_piece = [](const at::Tensor& buffer, const std::vector<std::vector<Piece>>& pieces, auto&& f) {
    std::int64_t begin = 0;
    for (const std::vector<Piece>& of_rank : pieces) {
      for (const Piece& piece : of_rank) {
        const at::Tensor packed = buffer.narrow(0, begin, piece.count).view(piece.here.sizes());
        if (packed.data_ptr() != piece.here.data_ptr()) f(packed, piece.here);
        begin += piece.count;
      }
    }
  };
  const std::vector<std::int64_t> in_splits = splits_of(sent), out_splits = splits_of(received);
  const auto total = [](const std::vector<std::int64_t>& splits) {
    return std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
  };
  const at::Tensor in = buffer_for(sent, total(in_splits)), out = buffer_for(received, total(out_splits));
  each_piece(in, sent, [](const at::Tensor& packed, const at::Tensor& here) { packed.copy_(here); });
  group.all_to_all(out, in, out_splits, in_splits);
  each_piece(out, received, [](const at::Tensor& packed, const at::Tensor& here) { here.copy_(packed); });

  for (const Shard& shard : resharded) shard.tensor.set_requires_grad(requires_grad());
  state_->local_shards = std::move(resharded);
  state_->metadata = std::move(target);
  state_->spec = std::move(spec);
  if (state_->init_rrefs) share_shards(*state_->remote_shards, group, state_->metadata, state_->local_shards);
}

}  // namespace tessera
