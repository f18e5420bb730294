#pragma once
// A rank's boxes of a parameter, or of the optimizer state of a parameter, as saved in a checkpoint.

#include "tessera/fsdp/flat_param_handle.h"
#include "tessera/tensor/checkpointable.h"
#include "tessera/tensor/dtensor_parameters.h"

namespace tessera::fsdp {

class FlatParamPart : public Checkpointable {
 public:
  // `piece` contains this rank's elements of parameter `param` in the order of its shard: one-dimensional, of any
  // dtype. If the parameter is the local tensor of a DTensor, `spec` is that of the DTensor, and the boxes are boxes of
  // the DTensor. Otherwise `spec` is null.
  FlatParamPart(const FlatParamHandle& handle, std::size_t param, at::Tensor piece, const DTensorSpec* spec);

  const std::vector<std::int64_t>& size() const override { return size_; }
  std::optional<TensorProperties> properties() const override;
  const std::vector<Box>& local_chunks() const override { return chunks_; }
  at::Tensor local_tensor(std::size_t i) const override;

  const at::Tensor& piece() const { return piece_; }

 private:
  std::vector<std::int64_t> size_;
  std::vector<Box> chunks_;
  struct View {
    std::int64_t offset;  // in the piece
    std::vector<std::int64_t> strides;
  };
  std::vector<View> views_;
  at::Tensor piece_;
};

}  // namespace tessera::fsdp
