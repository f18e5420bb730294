#pragma once
/// \file
/// A tensor of which each rank has a summand: what a product over a sharded dimension leaves.
///
/// Law: the tensor is the sum of all ranks' `local()`, which are of one size and dtype. PyTorch 1.13:
/// torch/distributed/_shard/partial_tensor.py.

#include <ATen/core/Tensor.h>

#include <memory>

#include "tessera/comm/process_group.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera {

class PartialTensor {
 public:
  PartialTensor(const ProcessGroup& group, const at::Tensor& local);

  const at::Tensor& local() const { return local_; }
  const ProcessGroup& process_group() const { return group_; }

  /// The sum, cut as `spec` says, differentiable. All ranks must call it. Throws `Error(unsupported)` for another spec
  /// than a ChunkShardingSpec that has one chunk on each rank.
  ShardedTensor reshard(ShardedTensor::SpecPtr spec) const;
  /// The sum, whole on every rank, differentiable. All ranks must call it.
  at::Tensor all_reduce() const;

 private:
  ProcessGroup group_;
  at::Tensor local_;
};

}  // namespace tessera
