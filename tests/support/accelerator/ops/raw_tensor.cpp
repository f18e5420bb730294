#include "support/accelerator/ops/raw_tensor.h"

#include <ATen/Functions.h>
#include <c10/util/accumulate.h>

#include "support/accelerator/memory.h"

namespace tessera::sim {

RawTensor::RawTensor(const at::Tensor& tensor)
    : sizes(tensor.sizes().vec()),
      strides(tensor.strides().vec()),
      dtype(tensor.scalar_type()),
      is_conj(tensor.is_conj()),
      is_neg(tensor.is_neg()) {
  TORCH_CHECK(tensor.is_cpu() || tensor.is_privateuseone(), "sim: found a tensor on ", tensor.device(),
              ", expected one on sim or cpu");
  if (tensor.numel() == 0) return;
  void* data = const_cast<void*>(tensor.const_data_ptr());  // NOLINT: a task may be a writer or a reader
  address = tensor.is_cpu() ? data : Memory::get().readable(data);
}

std::int64_t RawTensor::bytes() const {
  return c10::multiply_integers(sizes) * static_cast<std::int64_t>(c10::elementSize(dtype));
}

at::Tensor RawTensor::on_cpu() const {
  const auto options = at::TensorOptions().dtype(dtype);
  if (address == nullptr) return at::empty_strided(sizes, strides, options);
  const at::Tensor tensor = at::from_blob(address, sizes, strides, options);
  if (is_conj) tensor._set_conj(true);
  if (is_neg) tensor._set_neg(true);
  return tensor;
}

PlainDispatch::PlainDispatch()
    : keys_(c10::default_included_set.remove(c10::DispatchKey::ADInplaceOrView),
            c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset) {}

}  // namespace tessera::sim
