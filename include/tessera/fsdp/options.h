#pragma once
/// \file
/// How a model is sharded. PyTorch: torch/distributed/fsdp/api.py.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace tessera::fsdp {

enum class ShardingStrategy : std::uint8_t {
  full_shard,          ///< parameters, gradients and optimizer state; parameters are freed after forward
  shard_grad_op,       ///< the same, but parameters stay until their backward
  no_shard,            ///< nothing: gradients are averaged over the ranks
  hybrid_shard,        ///< full_shard within a group, no_shard between the groups
  hybrid_shard_zero2,  ///< shard_grad_op within a group, no_shard between the groups
};

/// Whether parameters are cut at all.
constexpr bool is_sharded(ShardingStrategy strategy) { return strategy != ShardingStrategy::no_shard; }
constexpr bool is_hybrid(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::hybrid_shard || strategy == ShardingStrategy::hybrid_shard_zero2;
}
constexpr bool reshards_after_forward(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::full_shard || strategy == ShardingStrategy::hybrid_shard;
}

/// Dtypes that differ from the parameters' own. The shards, which the optimizer works on, always keep that.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype = std::nullopt;   ///< of parameters in forward and backward
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;  ///< in which gradients are reduced; else param_dtype
  std::optional<at::ScalarType> buffer_dtype = std::nullopt;  ///< of the buffers
  bool keep_low_precision_grads = false;                      ///< gradients stay in it for the optimizer
  bool cast_forward_inputs = false;      ///< of every unit, where they are floating-point tensors, to param_dtype
  bool cast_root_forward_inputs = true;  ///< of the whole model
};

}  // namespace tessera::fsdp
