#pragma once
/// \file
/// Sharding strategies and mixed precision of a sharded model. PyTorch: torch/distributed/fsdp/api.py.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace tessera::fsdp {

/// The parts of the training state that are sharded.
enum class ShardingStrategy : std::uint8_t {
  full_shard,          ///< parameters, gradients and optimizer state; parameters are resharded after forward. In a
                       ///< group of one rank this is no_shard, which copies nothing
  shard_grad_op,       ///< the same, but parameters stay unsharded until their backward
  no_shard,            ///< nothing; parameters are replicated and gradients averaged over the ranks
  hybrid_shard,        ///< full_shard within a group, no_shard between the groups
  hybrid_shard_zero2,  ///< shard_grad_op within a group, no_shard between the groups
};

/// Returns whether a rank has only a shard of the parameters.
constexpr bool is_sharded(ShardingStrategy strategy) { return strategy != ShardingStrategy::no_shard; }
constexpr bool is_hybrid(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::hybrid_shard || strategy == ShardingStrategy::hybrid_shard_zero2;
}
constexpr bool reshards_after_forward(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::full_shard || strategy == ShardingStrategy::hybrid_shard;
}

/// Dtypes of computation and communication. Shards, which the optimizer works on, always keep the parameters' own
/// dtype.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype = std::nullopt;   ///< of unsharded parameters
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;  ///< of gradients in reductions; by default param_dtype
  std::optional<at::ScalarType> buffer_dtype = std::nullopt;  ///< of floating-point buffers
  bool keep_low_precision_grads = false;                      ///< keeps gradients in param_dtype for the optimizer
  bool cast_forward_inputs = false;      ///< casts floating-point inputs of each unit to param_dtype
  bool cast_root_forward_inputs = true;  ///< the same for inputs of the model itself
};

}  // namespace tessera::fsdp
