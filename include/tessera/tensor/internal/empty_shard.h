#pragma once
// Memory for shards, and for what comes and goes as often.

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace tessera {

// Smaller memory costs few page faults, and the heap keeps it.
constexpr std::size_t kLargeShardBytes = std::size_t{8} << 20;

// As at::empty, but memory on CPU of `large_bytes` or more is in huge pages where the system has them, may be what
// another shard had before (see base/block_cache.h), and can't be resized: a shard is written once, from one end to the
// other, and page faults would take longer than the writing.
at::Tensor empty_shard(at::IntArrayRef size, const at::TensorOptions& options,
                       std::size_t large_bytes = kLargeShardBytes);

}  // namespace tessera
