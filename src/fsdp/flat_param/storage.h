#pragma once
// Memory of flat parameters. It is freed and allocated many times in a step, and reused from one to the next.

#include <ATen/core/Tensor.h>

#include <memory>

namespace tessera::fsdp {

// Takes a tensor's memory out of it. The tensor and its views remain, but must not be accessed before allocate_storage.
c10::DataPtr take_storage(const at::Tensor& tensor);
// Frees it.
void free_storage(const at::Tensor& tensor);
// Allocates memory with undefined contents for a tensor that spans its entire storage.
void allocate_storage(const at::Tensor& tensor);

// Gives a tensor that spans its entire storage the memory at `data`, which `owner` owns.
void set_storage(const at::Tensor& tensor, void* data, std::shared_ptr<const void> owner);

// Returns a one-dimensional tensor with undefined contents.
at::Tensor empty_flat(std::int64_t numel, const at::TensorOptions& options);

// Returns cached blocks and unused memory of the heap to the system, the latter if the allocator supports it. Otherwise
// small allocations fill the gaps that large tensors leave, and that memory cannot be returned later.
void return_free_memory();

}  // namespace tessera::fsdp
