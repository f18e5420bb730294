#include <ATen/ops/resolve_conj.h>
#include <ATen/ops/resolve_neg.h>
#include <c10/util/StringUtil.h>

#include "tensor/dtensor/placement.h"
#include "tensor/sharded/reshard.h"
#include "tensor/sharded/state.h"
#include "tessera/base/error.h"
#include "tessera/tensor/internal/empty_shard.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

Resharded reshard(const ShardedTensor& tensor, const ShardedTensorMetadata& target, const ExchangeOptions& options) {
  const ProcessGroup& group = tensor.process_group();
  Resharded result;
  std::vector<at::Tensor> sources, destinations;
  for (const Shard& shard : tensor.local_shards()) {
    sources.push_back(shard.tensor.detach().resolve_conj().resolve_neg().contiguous());
  }
  for (const ShardMetadata& shard : target.shards_metadata) {
    if (rank_of(shard, group) != group.rank()) continue;
    destinations.push_back(empty_shard(shard.shard_sizes, at::TensorOptions()
                                                              .dtype(tensor.scalar_type())
                                                              .device(to_device(shard.placement->device()))
                                                              .pinned_memory(tensor.is_pinned())));
    result.shards.push_back({destinations.back(), shard});
  }
  const std::vector<ShardMetadata>& before = tensor.metadata().shards_metadata;
  const ReshardPlan plan = plan_reshard(tensor.metadata(), target, group);
  result.received_bytes = exchange({group, plan, sources, destinations, tensor.scalar_type(), staging_device(before),
                                    are_on_cpu(before) && are_on_cpu(target.shards_metadata)},
                                   options);
  for (const Shard& shard : result.shards) shard.tensor.set_requires_grad(tensor.requires_grad());
  return result;
}

void ShardedTensor::reshard(SpecPtr spec) {
  ShardedTensorMetadata target;
  process_group().check_call("reshard a sharded tensor", [&](CallArguments& arguments) {
    target = metadata_by(spec, size(), metadata().tensor_properties);
    check_partition(target, "reshard");
    arguments.add("from", comparable_text(metadata()))
        .add("to", comparable_text(target))
        .add("spec", comparable_text(*spec));
  });
  // If this differs between ranks, the specs differ only in indices of devices. Then no rank sends elements, and there
  // are no remote shards, which are on CPU.
  if (*spec == sharding_spec()) return;
  state_->local_shards = tessera::reshard(*this, target, {}).shards;
  state_->metadata = std::move(target);
  state_->spec = std::move(spec);
  if (state_->init_rrefs) share_shards(*state_->remote_shards, process_group(), state_->metadata, state_->local_shards);
}

ShardedTensor ShardedTensor::from_tensor(const at::Tensor& tensor, SpecPtr spec, const ProcessGroup& group, int src,
                                         bool init_rrefs) {
  // The full tensor is a sharded tensor with one shard on `src` and none on the other ranks.
  std::vector<Shard> full;
  Sizes size;
  group.check_call("sharded tensor from the tensor of one rank", [&](CallArguments& arguments) {
    if (src < 0 || src >= group.size()) {
      fail(ErrorCode::invalid_argument, "sharded tensor from the tensor of rank {}: expected a rank of 0 to {}", src,
           group.size() - 1);
    }
    require_spec(spec);
    arguments.add("src", src).add("spec", comparable_text(*spec)).add("init_rrefs", init_rrefs);
    require_rpc(init_rrefs);
    if (group.rank() != src) return;
    if (!tensor.defined())
      fail(ErrorCode::invalid_argument, "the tensor of rank {} is undefined, expected the full tensor", src);
    if (tensor.layout() != at::kStrided)
      fail(ErrorCode::unsupported, "the tensor of rank {} has layout {}, expected torch.strided", src,
           c10::str(tensor.layout()));
    size = tensor.sizes().vec();
    full.push_back({tensor.detach().contiguous().set_requires_grad(tensor.requires_grad()),
                    {Sizes(size.size(), 0), size, RemoteDevice(src, to_device(tensor.device()))}});
  });
  const ShardedTensor before = from_local_shards(std::move(full), size, group);
  auto state = std::make_shared<State>();
  state->group = group;
  group.check_call("shard a tensor", [&](CallArguments& arguments) {
    state->metadata = metadata_by(spec, before.size(), before.metadata().tensor_properties);
    check_partition(state->metadata, "shard");
    arguments.add("to", comparable_text(state->metadata));
  });
  state->local_shards = tessera::reshard(before, state->metadata, {}).shards;
  state->spec = std::move(spec);
  state->init_rrefs = init_rrefs;
  return finish(std::move(state));
}

}  // namespace tessera
