#pragma once
// Uninitialized memory for shards and for buffers that are allocated as often.

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace tessera {

// Below this size, page faults are few and the heap reuses the memory.
constexpr std::size_t kLargeShardBytes = std::size_t{8} << 20;

// As at::empty, except for `large_bytes` or more on CPU: this memory is in huge pages where the system has them, may be
// reused from an earlier shard (see base/block_cache.h), and cannot be resized. A shard is written once from start to
// end, and page faults would take longer than the writes. Throws Error(io) if there is no such memory.
at::Tensor empty_shard(at::IntArrayRef size, const at::TensorOptions& options,
                       std::size_t large_bytes = kLargeShardBytes);

}  // namespace tessera
