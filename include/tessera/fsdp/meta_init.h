#pragma once
/// \file
/// Models that are built without memory, and get it later.
///
///     Gpt gpt = [&] {
///       const fsdp::MetaInit without_memory;
///       return Gpt(config);                                     // larger than this machine's memory, built at once
///     }();
///     fsdp::materialize(gpt->head->weight, at::kCPU);           // has memory now, and whatever was in it
///
/// Under a MetaInit every function that makes a tensor makes it on the meta device, whatever device it is asked for:
/// that has a shape and a dtype and no elements. What computes on such tensors computes shapes, so initialisers do
/// nothing. LibTorch's modules need not know, nor need one's own that only make tensors, compute with them and register
/// them.
///
/// Law: a module that was built under MetaInit, materialized, and given the values of one that was built without, does
/// what that one does, training included.
///
/// What has no elements can't be looked at. Out of a constructor that wants to there come LibTorch's errors:
/// - of `item()`, `data_ptr()`, `accessor()` and whatever needs values to know a shape (`nonzero`, a mask as index);
/// - of `at::tensor({...})`; `torch::tensor` works;
/// - c10::NotImplementedError of operators that LibTorch has for no meta tensor: up to 2.14 `randperm`, `tril_indices`,
///   `triu_indices`, `complex`, `polar`, `flip` and `bucketize`, in 1.13 also `diag` (and so `init::orthogonal_`).
/// There, say MetaInit::Pause.
///
/// Threads: a guard is for the thread that made it, and ends there. Different tensors may be materialized by different
/// threads. PyTorch: `with torch.device("meta")` and `Module.to_empty`. This stands on the dispatch key DeferredInit,
/// which LibTorch keeps for libraries that do this, so there can be but one of them in a process.

#include <ATen/core/Tensor.h>

namespace tessera::fsdp {

class MetaInit {
 public:
  MetaInit();
  ~MetaInit();
  MetaInit(const MetaInit&) = delete;
  MetaInit& operator=(const MetaInit&) = delete;

  /// Within it tensors are real again, until it ends or another MetaInit begins: for buffers that are computed and have
  /// to keep their values. They are where they were asked for.
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

/// Gives a tensor on meta memory on `device`, in place: whoever holds the tensor sees it, and what it was it stays, a
/// parameter and its hooks included. It has no values until somebody sets them, and no gradient. Does nothing for a
/// tensor that isn't on meta. The strides are those of at::empty_like: the tensor's own where it is dense. Views and
/// aliases of it stay on meta; each gets memory of its own when it is materialized itself.
///
/// Throws `Error(invalid_argument)` for an undefined tensor, one that was computed from others that need gradients, and
/// if `device` is meta; `Error(unsupported)` for one that isn't strided, or is quantized.
void materialize(const at::Tensor& meta, at::Device device);

}  // namespace tessera::fsdp
