#include "tessera/tensor/shard.h"

#include "tessera/base/error.h"
#include "tessera/tensor/remote_shard.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

Shard Shard::from_tensor_and_offsets(const at::Tensor& tensor, std::vector<std::int64_t> offsets, int rank) {
  return {tensor,
          ShardMetadata(std::move(offsets), tensor.sizes().vec(), RemoteDevice(rank, to_device(tensor.device())))};
}

Shard RemoteShard::fetch(std::optional<std::chrono::milliseconds> timeout) const {
  try {
    return {tensor_.fetch(timeout), metadata_};
  } catch (const Error& error) {
    fail(error.code(), "shard {}: {}", to_string(metadata_), error.what());
  }
}

}  // namespace tessera
