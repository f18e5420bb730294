#pragma once
// A tensor's memory, given back and taken again while its views live on.

#include <ATen/core/Tensor.h>

namespace tessera::fsdp {

// Nobody may touch the tensor or its views until allocate_storage.
inline void free_storage(const at::Tensor& tensor) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  storage.set_nbytes(0);
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
}

// For a tensor that is all of its storage. What it holds is undefined.
inline void allocate_storage(const at::Tensor& tensor) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  const std::size_t bytes = static_cast<std::size_t>(tensor.numel()) * tensor.element_size();
  storage.set_data_ptr_noswap(storage.allocator()->allocate(bytes));
  storage.set_nbytes(bytes);
}

}  // namespace tessera::fsdp
