#pragma once
// Memory of flat parameters, which comes and goes many times in a step: what one has given back, the next one gets.

#include <ATen/core/Tensor.h>

namespace tessera::fsdp {

// A tensor's memory, given back and taken again while its views live on. Nobody may touch the tensor or its views in
// between.
void free_storage(const at::Tensor& tensor);
// For a tensor that is all of its storage. What it holds is undefined.
void allocate_storage(const at::Tensor& tensor);

// One-dimensional, of undefined contents.
at::Tensor empty_flat(std::int64_t numel, const at::TensorOptions& options);

// Gives memory that the heap has and nobody uses back to the system, where that can be done. Holes that large tensors
// leave are otherwise kept, or taken for small ones, so that they can't be given back later.
void return_free_memory();

}  // namespace tessera::fsdp
