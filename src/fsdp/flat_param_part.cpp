#include "fsdp/flat_param_part.h"

#include <utility>

#include "tessera/tensor/torch_types.h"

namespace tessera::fsdp {

FlatParamPart::FlatParamPart(const FlatParamHandle& handle, std::size_t param, at::Tensor piece)
    : size_(handle.layout().params()[param].shape), piece_(std::move(piece)) {
  const FlatParamLayout& layout = handle.layout();
  const auto info = layout.shard_param_info(handle.shard_rank(), param);
  if (!info) return;
  for (FlatParamPiece& box : layout.pieces(handle.shard_rank(), param)) {
    chunks_.push_back(std::move(box.box));
    views_.push_back({box.offset_in_shard - info->offset_in_shard, std::move(box.strides)});
  }
}

TensorProperties FlatParamPart::properties() const { return properties_of(piece_); }

at::Tensor FlatParamPart::local_tensor(std::size_t i) const {
  return piece_.detach().as_strided(chunks_[i].sizes, views_[i].strides, piece_.storage_offset() + views_[i].offset);
}

}  // namespace tessera::fsdp
