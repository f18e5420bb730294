// Ops that make tensors and views, and what else computes nothing.

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "support/accelerator/allocator.h"
#include "support/accelerator/device.h"
#include "support/accelerator/memory.h"

namespace tessera::sim {

namespace {

using at::IntArrayRef;
using at::Tensor;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device device_or_current(std::optional<c10::Device> wanted) {
  if (wanted && wanted->has_index()) return *wanted;
  return device(current_device());
}

void check_strided(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(layout.value_or(c10::Layout::Strided) == c10::Layout::Strided, "sim: found layout ", *layout,
              ", expected strided");
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
}

Tensor empty_tensor(IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
                    std::optional<c10::Device> wanted, std::optional<bool> pin_memory,
                    std::optional<c10::MemoryFormat> format) {
  check_strided(layout, pin_memory);
  const c10::DeviceGuard guard(device_or_current(wanted));
  return at::detail::empty_generic(sizes, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided_tensor(IntArrayRef sizes, IntArrayRef strides, std::optional<at::ScalarType> dtype,
                            std::optional<c10::Layout> layout, std::optional<c10::Device> wanted,
                            std::optional<bool> pin_memory) {
  check_strided(layout, pin_memory);
  const c10::DeviceGuard guard(device_or_current(wanted));
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

// Sets the sizes and makes room for them.
void set_geometry(const Tensor& self, IntArrayRef sizes, IntArrayRef strides) {
  c10::TensorImpl& impl = *self.unsafeGetTensorImpl();
  impl.set_sizes_and_strides(sizes, strides);
  if (self.numel() == 0) return;
  const std::size_t bytes = at::detail::computeStorageNbytes(sizes, strides, self.dtype().itemsize(),
                                                             static_cast<std::size_t>(self.storage_offset()));
  if (bytes > self.storage().nbytes()) resize_storage(*self.storage().unsafeGetStorageImpl(), bytes);
}

const Tensor& resize(const Tensor& self, IntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  if (self.sizes() != sizes) {
    std::vector<std::int64_t> strides(sizes.size());
    std::int64_t stride = 1;
    for (std::size_t i = sizes.size(); i-- > 0; stride *= std::max(sizes[i], std::int64_t{1})) strides[i] = stride;
    set_geometry(self, sizes, strides);
  }
  if (format && *format != c10::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage, std::int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  at::native::checkSetStorage(self, std::move(storage), offset, sizes, strides);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (strides.size() == sizes.size() && strides.data() != nullptr) {
    set_geometry(self, sizes, strides);
  } else {
    std::vector<std::int64_t> contiguous(sizes.size());
    std::int64_t stride = 1;
    for (std::size_t i = sizes.size(); i-- > 0; stride *= std::max(sizes[i], std::int64_t{1})) contiguous[i] = stride;
    set_geometry(self, sizes, contiguous);
  }
  return self;
}

Tensor& set_empty(Tensor& self) {
  const Tensor empty = empty_tensor({0}, self.scalar_type(), std::nullopt, self.device(), std::nullopt, std::nullopt);
  return set_storage(self, empty.storage(), 0, {0}, {1});
}

void record_tensor_stream(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), key_of(stream));
}

// Module::to() sets the data of a parameter on the CPU to a tensor on the device. LibTorch 2.6 does not know that these
// are alike.
bool has_compatible_type(const Tensor& self, const Tensor& from) {
  const auto is_plain = [](const Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || tensor.is_privateuseone());
  };
  return is_plain(self) && is_plain(from);
}

// The CPU's kernel has no argument for a generator. This draws what it draws.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (input.numel() == 0 || !train.value_or(true))
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  const Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {at::mul(input, mask).mul_(p == 1 ? 0.0 : 1.0 / (1.0 - p)), mask};
}

}  // namespace

void resize_storage(c10::StorageImpl& storage, std::size_t bytes) {
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr data = device_allocator()->allocate(bytes);
  const std::size_t copied = std::min(bytes, storage.nbytes());
  if (copied > 0 && storage.data() != nullptr) device_allocator()->copy_data(data.get(), storage.data(), copied);
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

void register_tensor_ops() {
  static torch::Library& library =
      *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library.impl("empty.memory_format", &empty_tensor);
  library.impl("empty_strided", &empty_strided_tensor);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, c10::Storage)>(&at::native::set_));
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_", &set_empty);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", static_cast<Tensor (*)(const Tensor&, IntArrayRef)>(&at::native::view));
  library.impl("_reshape_alias",
               static_cast<Tensor (*)(const Tensor&, IntArrayRef, IntArrayRef)>(&at::native::_reshape_alias));
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("is_set_to", &at::native::is_set_to);
  library.impl("record_stream", &record_tensor_stream);
  library.impl("native_dropout", &native_dropout);
  library.impl("_has_compatible_shallow_copy_type", &has_compatible_type);
  static torch::Library& autograd =
      *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
  autograd.impl("_has_compatible_shallow_copy_type", &has_compatible_type);
}

}  // namespace tessera::sim
