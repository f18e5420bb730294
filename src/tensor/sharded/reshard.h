#pragma once
// ShardedTensor::reshard with its choices laid open.

#include <vector>

#include "tensor/exchange/exchange.h"
#include "tessera/layout/shard_metadata.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera {

struct Resharded {
  std::vector<Shard> shards;  // of this rank
  ReceivedBytes received_bytes;
};

// The shards of `target`, which must partition the tensor and be the same on all ranks, with this tensor's elements.
// The tensor stays as it is. A collective.
Resharded reshard(const ShardedTensor& tensor, const ShardedTensorMetadata& target, const ExchangeOptions& options);

}  // namespace tessera
