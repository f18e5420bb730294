#include "fsdp/flat_param/part.h"

#include <utility>

#include "tessera/tensor/torch_types.h"

namespace tessera::fsdp {

FlatParamPart::FlatParamPart(const FlatParamHandle& handle, std::size_t param, at::Tensor piece,
                             const DTensorSpec* spec)
    : size_(spec != nullptr ? spec->layout.size() : handle.layout().params()[param].shape), piece_(std::move(piece)) {
  const FlatParamLayout& layout = handle.layout();
  const auto info = layout.shard_param_info(handle.shard_rank(), param);
  if (!info) return;
  std::vector<LocalBox> local_boxes;
  if (spec != nullptr) {
    local_boxes = spec->layout.local_boxes(*spec->mesh.coordinate());
  } else {
    local_boxes.push_back({Box::full(size_), std::vector<std::int64_t>(size_.size(), 0)});
  }
  for (const FlatParamPiece& part : layout.pieces(handle.shard_rank(), param)) {
    for (const LocalBox& local : local_boxes) {
      std::optional<Box> common = intersect(part.box, {local.local_offsets, local.box.sizes});
      if (!common) continue;
      View view{part.offset_in_shard - info->offset_in_shard, part.strides};
      for (std::size_t d = 0; d < size_.size(); ++d) {
        view.offset += (common->offsets[d] - part.box.offsets[d]) * part.strides[d];
        common->offsets[d] += local.box.offsets[d] - local.local_offsets[d];
      }
      chunks_.push_back(std::move(*common));
      views_.push_back(std::move(view));
    }
  }
}

std::optional<TensorProperties> FlatParamPart::properties() const { return properties_of(piece_); }

at::Tensor FlatParamPart::local_tensor(std::size_t i) const {
  return piece_.detach().as_strided(chunks_[i].sizes, views_[i].strides, piece_.storage_offset() + views_[i].offset);
}

}  // namespace tessera::fsdp
