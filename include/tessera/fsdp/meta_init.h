#pragma once
/// \file
/// Construction of models without memory, which is allocated later.
///
///     Gpt gpt = [&] {
///       const fsdp::MetaInit without_memory;
///       return Gpt(config);                                     // may be larger than this machine's memory
///     }();
///     fsdp::materialize(gpt->head->weight, at::kCPU);           // has memory with undefined contents
///
/// During the lifetime of a MetaInit, every function that creates a tensor creates it on the meta device, whatever
/// device the caller asks for. Such a tensor has a shape and a dtype but no elements. Operators compute only shapes, so
/// initializers have no effect. Modules need no changes, neither LibTorch's nor a user's, if their constructors only
/// create tensors, compute with them and register them.
///
/// Law: if a module is constructed under MetaInit, materialized, and assigned the values of a module that was
/// constructed without, both behave alike, also in training.
///
/// The elements of meta tensors cannot be read. A constructor that reads them gets errors of LibTorch:
/// - from `item()`, `data_ptr()`, `accessor()` and whatever needs values to know a shape (`nonzero`, a mask as index);
/// - from `at::tensor({...})`; `torch::tensor` works;
/// - c10::NotImplementedError from operators that LibTorch does not implement for meta tensors: up to 2.14 `randperm`,
///   `tril_indices`, `triu_indices`, `complex`, `polar`, `flip` and `bucketize`; in 1.13 also `diag`, which
///   `init::orthogonal_` calls.
/// Use MetaInit::Pause around such code.
///
/// Threads: a guard affects the thread that created it, and must be destroyed there. Different threads may materialize
/// different tensors. PyTorch: `with torch.device("meta")` and `Module.to_empty`. The implementation uses the dispatch
/// key DeferredInit, which LibTorch reserves for this purpose, so a process can contain only one such library.

#include <ATen/core/Tensor.h>

namespace tessera::fsdp {

/// A guard that makes this thread create tensors on the meta device during its lifetime.
class MetaInit {
 public:
  MetaInit();
  ~MetaInit();
  MetaInit(const MetaInit&) = delete;
  MetaInit& operator=(const MetaInit&) = delete;

  /// A guard inside a MetaInit: tensors have memory again, on the device that the caller asks for, until it is
  /// destroyed or another MetaInit is constructed. Use it for buffers that are computed and must keep their values.
  class Pause {
   public:
    Pause();
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    bool before_;
  };

 private:
  bool before_;
};

/// Allocates memory on `device` for a tensor on meta, in place. The tensor keeps its identity, so all references to it
/// see the change, and a parameter keeps its hooks. Its values are undefined and its gradient is reset. Does nothing if
/// the tensor is not on meta. The strides are those of at::empty_like: unchanged if the tensor is dense. Views and
/// aliases of the tensor stay on meta; each gets separate memory when it is materialized itself.
///
/// Throws `Error(invalid_argument)` if the tensor is undefined, if it was computed from tensors that require gradients,
/// or if `device` is meta. Throws `Error(unsupported)` if it is not strided or is quantized.
void materialize(const at::Tensor& meta, at::Device device);

}  // namespace tessera::fsdp
