#pragma once
// What a ShardedTensor refers to, for the files that implement it.

#include <memory>
#include <utility>
#include <vector>

#include "tessera/comm/process_group.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera {

struct ShardedTensor::State {
  ProcessGroup group;
  SpecPtr spec;
  ShardedTensorMetadata metadata;
  std::vector<Shard> local_shards;
};

}  // namespace tessera
