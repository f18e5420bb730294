// copy_ between devices, and between a device and the host, as CUDA does it (PyTorch:
// aten/src/ATen/native/cuda/Copy.cu):
//
//   on a device                     a task on the current stream
//   between devices                 a task on the source's current stream, which the streams of both devices wait for
//   host to device                  a task that reads pinned memory late if `non_blocking`; else it reads a copy of the
//   source that
//                                   is made at once
//   device to host                  a task that writes pinned memory late if `non_blocking`; else the host waits for it
//
// CUDA waits in a blocking copy to the device as well; here this is not counted as a synchronization.

#include <ATen/ops/clone.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <utility>

#include "support/accelerator/device.h"
#include "support/accelerator/ops/raw_tensor.h"
#include "support/accelerator/pinned.h"

namespace tessera::sim {

namespace {

using at::Tensor;

void enqueue_copy(StreamKey stream, const Tensor& to, const Tensor& from) {
  const RawTensor out(to), in(from);
  Engine::get().enqueue(stream, "copy", [out, in] { out.on_cpu().copy_(in.on_cpu()); },
                        {.bytes = out.bytes() + in.bytes()});
}

void copy_between_devices(const Tensor& to, const Tensor& from) {
  Engine& engine = Engine::get();
  const StreamKey source = current_stream(from.device().index());
  if (to.device() == from.device()) return enqueue_copy(source, to, from);
  const StreamKey destination = current_stream(to.device().index());
  engine.wait(source, engine.record(destination));
  enqueue_copy(source, to, from);
  engine.wait(destination, engine.record(source));
}

void copy_to_device(const Tensor& to, const Tensor& from, bool non_blocking) {
  const StreamKey stream = current_stream(to.device().index());
  if (non_blocking && is_pinned(from.const_data_ptr())) {
    enqueue_copy(stream, to, from);
    record_pinned(from.const_data_ptr(), stream);
  } else {
    const PlainDispatch plain;
    const RawTensor out(to);
    Engine::get().enqueue(stream, "copy", [out, in = at::clone(from)] { out.on_cpu().copy_(in); },
                          {.bytes = 2 * out.bytes()});
  }
}

void copy_to_host(const Tensor& to, const Tensor& from, bool non_blocking) {
  const StreamKey stream = current_stream(from.device().index());
  enqueue_copy(stream, to, from);
  if (non_blocking && is_pinned(to.const_data_ptr())) {
    record_pinned(to.const_data_ptr(), stream);
  } else {
    Engine::get().synchronize_stream(stream, Engine::Kind::copy_to_host);
  }
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  TORCH_CHECK(self.defined() && source.defined(), "sim: copy_: a tensor is undefined");
  if (self.is_same(source)) return self;
  const Tensor from = self.sizes() == source.sizes() ? source : source.expand_as(self);
  if (self.numel() == 0) return self;
  if (!self.is_cpu() && !from.is_cpu()) {
    copy_between_devices(self, from);
  } else if (from.is_cpu()) {
    copy_to_device(self, from, non_blocking);
  } else {
    copy_to_host(self, from, non_blocking);
  }
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  Tensor out = to;
  return copy(out, self, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

}  // namespace

void register_copies() {
  static torch::Library& library =
      *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library.impl("copy_", &copy);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
}

}  // namespace tessera::sim
