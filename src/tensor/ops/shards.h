#pragma once
// Helpers of ops that treat each shard alike, for any spec.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <utility>
#include <vector>

#include "tessera/tensor/sharded_tensor.h"

namespace tessera::ops {

// Returns an empty tensor of the dtype, to find the dtype of a result on ranks without shards, too.
inline at::Tensor sample_of(const ShardedTensor& tensor) {
  return at::empty({0}, at::TensorOptions().dtype(tensor.scalar_type()));
}

inline bool result_requires_grad(bool any_input_does, at::ScalarType dtype) {
  return any_input_does && at::GradMode::is_enabled() && (at::isFloatingType(dtype) || at::isComplexType(dtype));
}

// Returns the tensor of f(shard) for each shard, which shares no memory with the input. f must keep the size. It may
// return its argument, as at::dropout does, but no other view of it.
template <typename F>
ShardedTensor map_shards(const ShardedTensor& input, F&& f) {
  const at::ScalarType dtype = f(sample_of(input)).scalar_type();
  std::vector<at::Tensor> tensors;
  for (const Shard& shard : input.local_shards()) {
    at::Tensor result = f(shard.tensor);
    tensors.push_back(result.is_same(shard.tensor) ? result.clone() : std::move(result));
  }
  return input.with_local_tensors(tensors, dtype, result_requires_grad(input.requires_grad(), dtype));
}

}  // namespace tessera::ops
