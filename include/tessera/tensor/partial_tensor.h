#pragma once
/// \file
/// A tensor that is the sum of one local tensor on each rank, such as the result of a product over a sharded dimension.
///
/// Law: the tensor is the sum of all ranks' `local()`, which have the same size and dtype. PyTorch 1.13:
/// torch/distributed/_shard/partial_tensor.py.

#include <ATen/core/Tensor.h>

#include <memory>

#include "tessera/comm/process_group.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera {

class PartialTensor {
 public:
  /// Creates the sum of `local` over the ranks of `group`. Does not communicate or check anything.
  PartialTensor(const ProcessGroup& group, const at::Tensor& local);

  const at::Tensor& local() const { return local_; }
  const ProcessGroup& process_group() const { return group_; }

  /// Reduce-scatters: returns the sum, sharded by `spec`; differentiable. All ranks must call it. Throws
  /// `Error(unsupported)` unless `spec` is a ChunkShardingSpec with one chunk on each rank.
  ShardedTensor reshard(ShardedTensor::SpecPtr spec) const;
  /// Returns the full sum on every rank; differentiable. All ranks must call it.
  at::Tensor all_reduce() const;

 private:
  ProcessGroup group_;
  at::Tensor local_;
};

}  // namespace tessera
