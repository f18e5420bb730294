#include "tessera/fsdp/meta_init.h"

#include <ATen/ops/empty_like.h>

namespace tessera::fsdp {

void materialize(at::Tensor& meta, at::Device device) {
  const at::Tensor made = at::empty_like(meta.detach(), meta.options().device(device).requires_grad(false));
  meta.unsafeGetTensorImpl()->shallow_copy_from(made.getIntrusivePtr());
}

}  // namespace tessera::fsdp
