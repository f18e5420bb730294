#include "tessera/tensor/internal/empty_shard.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/accumulate.h>

#include <new>

#include "tessera/base/error.h"
#include "tessera/base/internal/block_cache.h"

namespace tessera {

at::Tensor empty_shard(at::IntArrayRef size, const at::TensorOptions& options, std::size_t large_bytes) {
  const std::size_t bytes = static_cast<std::size_t>(c10::multiply_integers(size)) * options.dtype().itemsize();
  if (!options.device().is_cpu() || options.pinned_memory() || bytes < large_bytes) return at::empty(size, options);
  const Block block = [bytes] {
    try {
      return take_block(bytes);
    } catch (const std::bad_alloc&) {
      fail(ErrorCode::io, "allocate a tensor: the system refused {} bytes, expected free memory", bytes);
    }
  }();
  return at::from_blob(
      block.data, size, [block](void*) { give_back(block); }, options);
}

}  // namespace tessera
