#pragma once
// What a task knows of a tensor, and how it computes with it. A task owns no memory: if the tensor is freed before the
// task runs, the task reads what is at the address by then.

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <vector>

namespace tessera::sim {

struct RawTensor {
  void* address = nullptr;  // where the host may access it
  std::vector<std::int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
  bool is_conj = false, is_neg = false;  // the lazy bits of LibTorch

  RawTensor() = default;
  // Of a strided tensor on a device or the CPU.
  explicit RawTensor(const at::Tensor& tensor);
  // Of its elements, without what is between them.
  std::int64_t bytes() const;
  // Returns a CPU tensor over the memory.
  at::Tensor on_cpu() const;
};

// While it exists, ops of this thread run their CPU kernels, without autograd, autocast and callbacks, whatever the
// thread was doing.
class PlainDispatch {
 public:
  PlainDispatch();

 private:
  c10::impl::ForceDispatchKeyGuard keys_;
  at::DisableRecordFunctionGuard no_callbacks_;
};

}  // namespace tessera::sim
