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

// Returns the tensor of f(shard) for each shard. f must keep the size.
template <typename F>
ShardedTensor map_shards(const ShardedTensor& input, F&& f) {
  const at::ScalarType dtype = f(sample_of(input)).scalar_type();
  std::vector<at::Tensor> tensors;
  for (const Shard& shard : input.local_shards()) tensors.push_back(f(shard.tensor));
  return input.with_local_tensors(tensors, dtype, result_requires_grad(input.requires_grad(), dtype));
}

}  // namespace tessera::ops
