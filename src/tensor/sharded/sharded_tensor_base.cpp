#include "tessera/tensor/sharded/sharded_tensor_base.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

#include "tensor/torch_errors.h"
#include "tessera/base/error.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

namespace {

// Throws Error(invalid_argument) unless the tensor of `shard` is as the metadata states.
void check_alone(const Shard& shard, const ShardedTensorMetadata& metadata) {
  const auto refuse_expecting = [&](std::string_view what, const std::string& found, const std::string& expected) {
    fail(ErrorCode::invalid_argument, "shard {}: {} {}, expected {}", to_string(shard.metadata), what, found, expected);
  };
  if (!shard.tensor.defined()) refuse_expecting("tensor", "undefined", "a tensor");
  if (shard.tensor.layout() != at::kStrided)
    refuse_expecting("layout", c10::str(shard.tensor.layout()), "torch.strided");
  const auto& all = metadata.shards_metadata;
  if (std::find(all.begin(), all.end(), shard.metadata) == all.end()) {
    refuse_expecting("it is", "not in the metadata", "one of its shards");
  }
  const TensorProperties found = properties_of(shard.tensor), &expected = metadata.tensor_properties;
  if (shard.tensor.sizes() != at::IntArrayRef(shard.metadata.shard_sizes)) {
    refuse_expecting("size", shape_to_string(shard.tensor.sizes().vec()), shape_to_string(shard.metadata.shard_sizes));
  }
  if (found.dtype != expected.dtype) {
    refuse_expecting("dtype", std::string(dtype_name(found.dtype)), std::string(dtype_name(expected.dtype)));
  }
  if (found.requires_grad != expected.requires_grad) {
    refuse_expecting("requires_grad", found.requires_grad ? "true" : "false",
                     expected.requires_grad ? "true" : "false");
  }
  if (!shard.metadata.placement) return;
  const std::string device = to_string(to_device(shard.tensor.device()));
  const std::string placed = to_string(shard.metadata.placement->device());
  if (device != placed) refuse_expecting("device", device, placed);
}

}  // namespace

std::shared_ptr<ShardedTensorBase> ShardedTensorBase::from_local_shards_and_global_metadata(
    std::vector<Shard> local_shards, ShardedTensorMetadata metadata, std::shared_ptr<const ShardingSpec> spec) {
  try {
    if (metadata.shards_metadata.empty()) {
      fail(ErrorCode::invalid_argument, "sharded tensor of size {}: its metadata has no shards, expected at least one",
           shape_to_string(metadata.size));
    }
    validate_non_overlapping(metadata.shards_metadata);
    check_tensor(metadata.shards_metadata, metadata.size);
    for (std::size_t i = 0; i < local_shards.size(); ++i) {
      check_alone(local_shards[i], metadata);
      for (std::size_t j = 0; j < i; ++j) {
        if (local_shards[j].metadata != local_shards[i].metadata) continue;
        fail(ErrorCode::invalid_argument, "shard {} is given twice, expected each shard once",
             to_string(local_shards[i].metadata));
      }
    }
    std::shared_ptr<ShardedTensorBase> made(new ShardedTensorBase);
    made->spec_ = spec != nullptr ? std::move(spec) : infer_sharding_spec(metadata.shards_metadata);
    made->metadata_ = std::move(metadata);
    made->local_shards_ = std::move(local_shards);
    for (const Shard& shard : made->local_shards_) made->boxes_.emplace_back(shard.metadata.box());
    return made;
  } catch (...) {
    rethrow_as_error("sharded tensor");
  }
}

at::Tensor ShardedTensorBase::local_tensor(std::size_t i) const {
  if (i >= local_shards_.size()) {
    fail(ErrorCode::invalid_argument, "sharded tensor of size {}: local tensor {}, expected one of its {} local shards",
         shape_to_string(metadata_.size), i, local_shards_.size());
  }
  return local_shards_[i].tensor;
}

}  // namespace tessera
