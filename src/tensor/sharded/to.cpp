#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

#include "tensor/sharded/state.h"
#include "tessera/base/error.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

namespace {

void check_memory_format(at::MemoryFormat format) {
  if (format == at::MemoryFormat::Preserve || format == at::MemoryFormat::Contiguous) return;
  fail(ErrorCode::unsupported,
       "move a sharded tensor: memory format {}, expected torch.contiguous_format or torch.preserve_format",
       c10::str(format));
}

at::Device current_cuda_device() { return c10::impl::VirtualGuardImpl(at::kCUDA).getDevice(); }

void place_on(ShardMetadata& shard, const at::Device& device) {
  shard.placement = shard.placement->with(to_device(device));
}

// Whether all ranks' shards are placed on this type of device.
bool all_on(const std::vector<ShardMetadata>& shards, const std::string& type) {
  return std::all_of(shards.begin(), shards.end(),
                     [&](const ShardMetadata& shard) { return shard.placement->device().type == type; });
}

}  // namespace

at::Device ShardedTensor::device() const {
  if (!local_shards().empty()) return local_shards()[0].tensor.device();
  return process_group().backend() == "nccl" ? current_cuda_device() : at::Device(at::kCPU);
}

ShardedTensor ShardedTensor::cpu(at::MemoryFormat memory_format, const std::optional<ProcessGroup>& group) const {
  check_memory_format(memory_format);
  if (all_on(metadata().shards_metadata, "cpu")) return *this;
  ToOptions options;
  options.device = at::kCPU;
  options.copy = true;
  options.memory_format = memory_format;
  options.group = group;
  return to(options);
}

ShardedTensor ShardedTensor::cuda(bool non_blocking, at::MemoryFormat memory_format,
                                  const std::optional<ProcessGroup>& group) const {
  check_memory_format(memory_format);
  ToOptions options;
  options.device = current_cuda_device();
  options.non_blocking = non_blocking;
  options.memory_format = memory_format;
  options.group = group;
  const ShardedTensor moved = to(options);
  return moved.is_same(*this) ? finish(std::make_shared<State>(*state_)) : moved;
}

ShardedTensor ShardedTensor::to(const ToOptions& options) const {
  check_memory_format(options.memory_format);
  const at::Device here = local_shards().empty() ? to_device(metadata().shards_metadata[0].placement->device())
                                                 : local_shards()[0].tensor.device();
  at::Device device = options.device.value_or(here);
  if (options.device && device.is_cuda()) device = current_cuda_device();
  const at::ScalarType dtype = options.dtype.value_or(scalar_type());
  // A rank whose own shard does not move takes part in the change of all placements.
  const bool is_there = !options.device || ((device == here || local_shards().empty()) &&
                                            all_on(metadata().shards_metadata, to_device(device).type));
  if (!options.copy && is_there && dtype == scalar_type()) return *this;

  return finish(construct(options.group.value_or(process_group()), init_rrefs(), [&] {
    if (requires_grad() && !at::isFloatingType(dtype) && !at::isComplexType(dtype)) {
      fail(ErrorCode::invalid_argument,
           "move a sharded tensor that requires grad to {}: expected a floating-point or complex dtype",
           dtype_name(to_dtype(dtype)));
    }
    ShardedTensorMetadata moved = metadata();
    moved.tensor_properties.dtype = to_dtype(dtype);
    moved.tensor_properties.pin_memory = false;
    moved.tensor_properties.requires_grad = requires_grad() && at::GradMode::is_enabled();
    for (ShardMetadata& shard : moved.shards_metadata) {
      if (!is_there) place_on(shard, device);
    }
    std::vector<Shard> shards;
    for (const Shard& shard : local_shards()) {
      Shard copy = {shard.tensor.to(at::TensorOptions().device(device).dtype(dtype), options.non_blocking, options.copy,
                                    options.memory_format),
                    shard.metadata};
      // A shard that is there already is not converted.
      if (copy.tensor.requires_grad() && !moved.tensor_properties.requires_grad) copy.tensor = copy.tensor.detach();
      if (!is_there) place_on(copy.metadata, device);
      shards.push_back(std::move(copy));
    }
    auto state = std::make_shared<State>();
    state->group = options.group.value_or(process_group());
    state->spec = is_there ? state_->spec : infer_sharding_spec(moved.shards_metadata);
    state->metadata = std::move(moved);
    state->local_shards = std::move(shards);
    state->init_rrefs = state_->init_rrefs;
    return state;
  }));
}

}  // namespace tessera
