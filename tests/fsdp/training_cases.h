#pragma once
// What trainings on a device have to do as trainings on the CPU do it.

#include <vector>

#include "fsdp/training.h"

namespace tessera::fsdp {

inline void with_flat_params(Options& options) { options.use_orig_params = false; }
inline void in_bfloat16(Options& options) { options.mixed_precision.param_dtype = at::kBFloat16; }
inline void reduced_in_bfloat16(Options& options) {
  options.mixed_precision.reduce_dtype = at::kBFloat16;
  options.mixed_precision.keep_low_precision_grads = false;
}
inline void offloaded(Options& options) { options.offload_params = true; }
inline void offloaded_in_bfloat16(Options& options) {
  offloaded(options);
  in_bfloat16(options);
}
inline void far_ahead(Options& options) { options.max_prefetched_units = 3; }
inline void without_forward_prefetch(Options& options) { options.forward_prefetch = false; }
inline void prefetched_after(Options& options) { options.backward_prefetch = BackwardPrefetch::post; }
inline void not_prefetched(Options& options) {
  options.backward_prefetch = BackwardPrefetch::none;
  options.forward_prefetch = false;
}

inline const std::vector<Training> trainings{
    {.name = "full_shard"},
    {.name = "flat_params", .change = with_flat_params},
    {.name = "bfloat16", .change = in_bfloat16},
    {.name = "reduced_in_bfloat16", .change = reduced_in_bfloat16, .accumulated = 2},
    {.name = "accumulated", .accumulated = 2},
    {.name = "prefetched_after", .change = prefetched_after},
    {.name = "not_prefetched", .change = not_prefetched},
    {.name = "far_ahead", .change = far_ahead},
    {.name = "without_forward_prefetch", .change = without_forward_prefetch},
    {.name = "shard_grad_op", .strategy = ShardingStrategy::shard_grad_op},
    {.name = "shard_grad_op_bfloat16",
     .strategy = ShardingStrategy::shard_grad_op,
     .change = in_bfloat16,
     .accumulated = 2},
    {.name = "no_shard", .strategy = ShardingStrategy::no_shard},
    {.name = "no_shard_flat_params",
     .strategy = ShardingStrategy::no_shard,
     .change = with_flat_params,
     .accumulated = 2},
    {.name = "no_shard_bfloat16", .strategy = ShardingStrategy::no_shard, .change = in_bfloat16},
    {.name = "hybrid_shard", .strategy = ShardingStrategy::hybrid_shard},
    {.name = "hybrid_shard_bfloat16",
     .strategy = ShardingStrategy::hybrid_shard,
     .change = in_bfloat16,
     .accumulated = 2},
    {.name = "hybrid_shard_zero2", .strategy = ShardingStrategy::hybrid_shard_zero2, .accumulated = 2},
    {.name = "offloaded", .change = offloaded},
    {.name = "offloaded_accumulated", .change = offloaded, .accumulated = 3},
    {.name = "offloaded_bfloat16", .change = offloaded_in_bfloat16, .accumulated = 2},
    {.name = "offloaded_grad_op",
     .strategy = ShardingStrategy::shard_grad_op,
     .change = offloaded,
     .evaluates_between = true},
    {.name = "offloaded_no_shard", .strategy = ShardingStrategy::no_shard, .change = offloaded},
    {.name = "offloaded_hybrid", .strategy = ShardingStrategy::hybrid_shard, .change = offloaded, .accumulated = 2},
    {.name = "offloaded_changed", .change = offloaded, .changes_between = true, .evaluates_between = true},
    {.name = "checkpointed", .computes_again = true},
    {.name = "checkpointed_bfloat16", .change = in_bfloat16, .accumulated = 2, .computes_again = true},
    {.name = "checkpointed_grad_op", .strategy = ShardingStrategy::shard_grad_op, .computes_again = true},
    {.name = "checkpointed_offloaded", .change = offloaded, .computes_again = true},
    {.name = "scaled", .is_scaled = true},
    {.name = "scaled_bfloat16_hybrid",
     .strategy = ShardingStrategy::hybrid_shard,
     .change = in_bfloat16,
     .is_scaled = true},
    {.name = "scaled_offloaded", .change = offloaded, .is_scaled = true},
    {.name = "changed", .changes_between = true, .evaluates_between = true},
    {.name = "changed_bfloat16", .change = in_bfloat16, .changes_between = true, .evaluates_between = true},
    {.name = "written", .evaluates_between = true, .writes_between = true},
    {.name = "written_offloaded", .change = offloaded, .evaluates_between = true, .writes_between = true},
    {.name = "unsharded_before", .unshards_before = true},
    {.name = "unsharded_before_bfloat16", .change = in_bfloat16, .evaluates_between = true, .unshards_before = true},
    {.name = "synced_each", .accumulated = 3, .syncs_each = true},
    {.name = "synced_each_reduced_in_bfloat16", .change = reduced_in_bfloat16, .accumulated = 3, .syncs_each = true},
    {.name = "synced_each_hybrid",
     .strategy = ShardingStrategy::hybrid_shard,
     .change = reduced_in_bfloat16,
     .accumulated = 2,
     .syncs_each = true},
    {.name = "begins_on_side_stream", .evaluates_between = true, .begins_on_side_stream = true},
    {.name = "begins_on_side_stream_bfloat16", .change = in_bfloat16, .accumulated = 2, .begins_on_side_stream = true},
    {.name = "changed_no_shard",
     .strategy = ShardingStrategy::no_shard,
     .changes_between = true,
     .evaluates_between = true},
};

}  // namespace tessera::fsdp
