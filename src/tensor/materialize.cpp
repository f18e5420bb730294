#include "tessera/tensor/internal/materialize.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>

#include "tessera/base/error.h"
#include "tessera/tensor/internal/replace_data.h"

namespace tessera {

void check_can_materialize(const at::Tensor& meta, std::string_view operation) {
  if (meta.layout() != at::kStrided || meta.is_quantized()) {
    fail(ErrorCode::unsupported, "{}: it is {}, expected a strided tensor that is not quantized", operation,
         meta.is_quantized() ? "quantized" : "not strided");
  }
  if (!meta.is_leaf()) {
    fail(ErrorCode::invalid_argument, "{}: it was computed from tensors that require gradients, expected a leaf",
         operation);
  }
}

void materialize_in_place(const at::Tensor& meta, at::Device device) {
  const c10::InferenceMode mode(meta.is_inference());
  replace_data(meta, at::empty_like(meta, meta.options().device(device).requires_grad(false)));
}

}  // namespace tessera
