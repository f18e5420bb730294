#pragma once
// The implementation of ShardedTensor::reshard, with a choice of how elements are exchanged.

#include <vector>

#include "tensor/exchange/exchange.h"
#include "tessera/layout/shard_metadata.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera {

struct Resharded {
  std::vector<Shard> shards;  // of this rank
  ReceivedBytes received_bytes;
};

// Returns new shards with the tensor's elements, as in `target`, which must partition the tensor and be the same on all
// ranks. Does not modify the tensor. A collective.
Resharded reshard(const ShardedTensor& tensor, const ShardedTensorMetadata& target, const ExchangeOptions& options);

}  // namespace tessera
