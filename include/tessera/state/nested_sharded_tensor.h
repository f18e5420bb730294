#pragma once
/// \file
/// A sharded tensor whose shards on this rank are sharded tensors themselves, as FSDP produces from a tensor parallel
/// model. Each outer shard is a box of the full tensor. The ranks of the inner group hold boxes inside the outer box;
/// their offsets are relative to it.
///
/// It supports no computation, saving or loading. `flatten_sharded_tensors` converts it to a ShardedTensor, which does.
/// A plain value; the elements belong to the inner tensors. PyTorch: a ShardedTensor whose `Shard.tensor` is one.

#include <vector>

#include "tessera/layout/shard_metadata.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera {

struct NestedShard {
  ShardedTensor tensor;
  ShardMetadata metadata;  ///< of the outer shard, in the full tensor
};

struct NestedShardedTensor {
  std::vector<NestedShard> local_shards;
  ShardedTensorMetadata metadata;  ///< of the outer shards of all ranks
};

}  // namespace tessera
