#include "tessera/tensor/internal/replace_data.h"

#include <torch/csrc/autograd/variable.h>

#include <mutex>

namespace tessera {

void replace_data(const at::Tensor& tensor, const at::Tensor& data) {
  if (tensor.grad().defined()) tensor.mutable_grad().reset();
  if (torch::autograd::AutogradMeta* autograd = torch::autograd::impl::get_autograd_meta(tensor)) {
    const std::lock_guard lock(autograd->mutex_);
    autograd->grad_accumulator_.reset();  // it stores the device
  }
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

}  // namespace tessera
