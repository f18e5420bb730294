#include "tensor/empty_shard.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/accumulate.h>

#include "base/block_cache.h"

namespace tessera {

namespace {

// Smaller memory costs few page faults, and the heap keeps it.
constexpr std::size_t kLargeBytes = std::size_t{8} << 20;

}  // namespace

at::Tensor empty_shard(at::IntArrayRef size, const at::TensorOptions& options) {
  const std::size_t bytes = static_cast<std::size_t>(c10::multiply_integers(size)) * options.dtype().itemsize();
  if (!options.device().is_cpu() || options.pinned_memory() || bytes < kLargeBytes) return at::empty(size, options);
  const Block block = take_block(bytes);
  return at::from_blob(
      block.data, size, [block](void*) { give_back(block); }, options);
}

}  // namespace tessera
