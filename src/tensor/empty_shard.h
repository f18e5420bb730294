#pragma once
// Memory for shards.

#include <ATen/core/Tensor.h>

namespace tessera {

// As at::empty, but large memory on CPU is in huge pages where the system has them, may be what another shard had
// before (see base/block_cache.h), and can't be resized: a shard is written once, from one end to the other, and page
// faults would take longer than the writing.
at::Tensor empty_shard(at::IntArrayRef size, const at::TensorOptions& options);

}  // namespace tessera
