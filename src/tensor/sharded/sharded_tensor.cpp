#include "tessera/tensor/sharded_tensor.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <ostream>

#include "tensor/dtensor/placement.h"
#include "tensor/sharded/state.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

void require_spec(const ShardedTensor::SpecPtr& spec) {
  if (spec == nullptr) fail(ErrorCode::invalid_argument, "sharded tensor: the spec is null, expected a sharding spec");
}

ShardedTensorMetadata metadata_by(const ShardedTensor::SpecPtr& spec, const ShardedTensor::Sizes& size,
                                  const TensorProperties& properties) {
  require_spec(spec);
  if (std::any_of(size.begin(), size.end(), [](std::int64_t n) { return n < 0; })) {
    fail(ErrorCode::invalid_argument, "sharded tensor of size {}: expected no negative size", shape_to_string(size));
  }
  return spec->build_metadata(size, properties);
}

ShardedTensor ShardedTensor::make(SpecPtr spec, Sizes size, const ProcessGroup& group,
                                  const ShardedTensorOptions& options,
                                  FunctionRef<at::Tensor(at::IntArrayRef, const at::TensorOptions&)> create) {
  return finish(construct(group, options.init_rrefs, [&] {
    if (options.layout != at::kStrided) {
      fail(ErrorCode::unsupported, "sharded tensor of size {}: layout {}, expected torch.strided",
           shape_to_string(size), c10::str(options.layout));
    }
    if (options.memory_format != at::MemoryFormat::Contiguous) {
      fail(ErrorCode::unsupported, "sharded tensor of size {}: memory format {}, expected torch.contiguous_format",
           shape_to_string(size), c10::str(options.memory_format));
    }
    TensorProperties properties;
    properties.dtype = to_dtype(options.dtype);
    properties.requires_grad = options.requires_grad;
    properties.pin_memory = options.pin_memory;
    auto state = std::make_shared<State>();
    state->group = group;
    state->metadata = metadata_by(spec, size, properties);
    state->spec = std::move(spec);
    for (const ShardMetadata& shard : state->metadata.shards_metadata) {
      if (rank_of(shard, group) != group.rank()) continue;
      const at::Tensor tensor = create(shard.shard_sizes, at::TensorOptions()
                                                              .dtype(options.dtype)
                                                              .device(to_device(shard.placement->device()))
                                                              .pinned_memory(options.pin_memory));
      tensor.set_requires_grad(options.requires_grad);
      state->local_shards.push_back({tensor, shard});
    }
    state->init_rrefs = options.init_rrefs;
    return state;
  }));
}

ShardedTensor ShardedTensor::empty(SpecPtr spec, Sizes size, const ProcessGroup& group,
                                   const ShardedTensorOptions& options) {
  return make(std::move(spec), std::move(size), group, options,
              [](at::IntArrayRef sizes, const at::TensorOptions& o) { return at::empty(sizes, o); });
}

ShardedTensor ShardedTensor::zeros(SpecPtr spec, Sizes size, const ProcessGroup& group,
                                   const ShardedTensorOptions& options) {
  return make(std::move(spec), std::move(size), group, options,
              [](at::IntArrayRef sizes, const at::TensorOptions& o) { return at::zeros(sizes, o); });
}

ShardedTensor ShardedTensor::ones(SpecPtr spec, Sizes size, const ProcessGroup& group,
                                  const ShardedTensorOptions& options) {
  return make(std::move(spec), std::move(size), group, options,
              [](at::IntArrayRef sizes, const at::TensorOptions& o) { return at::ones(sizes, o); });
}

ShardedTensor ShardedTensor::full(SpecPtr spec, Sizes size, const at::Scalar& value, const ProcessGroup& group,
                                  const ShardedTensorOptions& options) {
  return make(std::move(spec), std::move(size), group, options,
              [&](at::IntArrayRef sizes, const at::TensorOptions& o) { return at::empty(sizes, o).fill_(value); });
}

ShardedTensor ShardedTensor::rand(SpecPtr spec, Sizes size, const ProcessGroup& group,
                                  const ShardedTensorOptions& options) {
  return make(std::move(spec), std::move(size), group, options,
              [](at::IntArrayRef sizes, const at::TensorOptions& o) { return at::rand(sizes, o); });
}

ShardedTensor ShardedTensor::randn(SpecPtr spec, Sizes size, const ProcessGroup& group,
                                   const ShardedTensorOptions& options) {
  return make(std::move(spec), std::move(size), group, options,
              [](at::IntArrayRef sizes, const at::TensorOptions& o) { return at::randn(sizes, o); });
}

const ShardedTensorMetadata& ShardedTensor::metadata() const { return state_->metadata; }
const ShardedTensor::SpecPtr& ShardedTensor::shared_spec() const { return state_->spec; }
const std::vector<Shard>& ShardedTensor::local_shards() const { return state_->local_shards; }
const ProcessGroup& ShardedTensor::process_group() const { return state_->group; }
bool ShardedTensor::init_rrefs() const { return state_->init_rrefs; }
std::int64_t ShardedTensor::size(std::int64_t dim) const {
  const std::int64_t dims = this->dim();
  if (dim < -dims || dim >= dims) {
    fail(ErrorCode::invalid_argument, "size of dimension {} of a sharded tensor of size {}: {}", dim,
         shape_to_string(size()),
         dims == 0 ? "it has no dimensions" : fmt::format("expected a dimension of {} to {}", -dims, dims - 1));
  }
  return size()[static_cast<std::size_t>(dim < 0 ? dim + dims : dim)];
}

std::int64_t ShardedTensor::numel() const { return volume(Box::full(size())); }

at::ScalarType ShardedTensor::scalar_type() const { return to_scalar_type(metadata().tensor_properties.dtype); }

const at::Tensor& ShardedTensor::local_tensor() const {
  if (local_shards().size() != 1) {
    fail(ErrorCode::unsupported, "local tensor of a sharded tensor: rank {} has {} shards, expected one",
         process_group().rank(), local_shards().size());
  }
  return local_shards()[0].tensor;
}

void ShardedTensor::set_requires_grad(bool requires_grad) {
  if (requires_grad && !at::isFloatingType(scalar_type()) && !at::isComplexType(scalar_type())) {
    fail(ErrorCode::invalid_argument,
         "sharded tensor of {} cannot require grad: expected a floating-point or complex dtype",
         dtype_name(metadata().tensor_properties.dtype));
  }
  for (const Shard& shard : local_shards()) shard.tensor.set_requires_grad(requires_grad);
  state_->metadata.tensor_properties.requires_grad = requires_grad;
}

std::string to_string(const ShardedTensor& tensor) { return "ShardedTensor " + to_string(tensor.metadata()); }

std::ostream& operator<<(std::ostream& out, const ShardedTensor& tensor) { return out << to_string(tensor); }

}  // namespace tessera
