#pragma once
/// \file
/// A sharded tensor whose shards on this rank are sharded tensors themselves: what FSDP makes of a model that is tensor
/// parallel already. Each outer shard is a box of the whole tensor; within it the ranks of the inner group have boxes
/// that count from that box's begin.
///
/// It can't be computed with, saved or loaded: `flatten_sharded_tensors` makes a ShardedTensor of it, which can.
/// Plain values; the elements are those of the inner tensors. PyTorch: a ShardedTensor whose `Shard.tensor` is one.

#include <vector>

#include "tessera/layout/shard_metadata.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera {

struct NestedShard {
  ShardedTensor tensor;
  ShardMetadata metadata;  ///< of the outer shard, in the whole tensor
};

struct NestedShardedTensor {
  std::vector<NestedShard> local_shards;
  ShardedTensorMetadata metadata;  ///< of the outer shards of all ranks
};

}  // namespace tessera
