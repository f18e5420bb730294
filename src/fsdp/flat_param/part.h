#pragma once
// What a rank has of a parameter, or of an optimizer's state of one, for a checkpoint: boxes of it.

#include "tessera/fsdp/flat_param_handle.h"
#include "tessera/tensor/checkpointable.h"
#include "tessera/tensor/dtensor_parameters.h"

namespace tessera::fsdp {

class FlatParamPart : public Checkpointable {
 public:
  // `piece` has this rank's elements of parameter `param`, in the order in which its shard has them: one-dimensional,
  // of any dtype. Where the parameter is the local tensor of a DTensor, `spec` says of which: that is of what these are
  // boxes. Null if it is a tensor by itself.
  FlatParamPart(const FlatParamHandle& handle, std::size_t param, at::Tensor piece, const DTensorSpec* spec);

  const std::vector<std::int64_t>& size() const override { return size_; }
  TensorProperties properties() const override;
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
