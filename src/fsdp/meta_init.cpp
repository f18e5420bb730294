#include "tessera/fsdp/meta_init.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <mutex>

#include "tessera/base/error.h"

namespace tessera::fsdp {

namespace {

constexpr c10::DispatchKey kKey = c10::DispatchKey::DeferredInit;

bool set_active(bool active) {
  const bool before = c10::impl::tls_is_dispatch_key_included(kKey);
  c10::impl::tls_set_dispatch_key_included(kKey, active);
  return before;
}

// Whether torch::tensor({...}) or the like is calling: it writes the elements to what it gets from at::empty, which
// must be on the CPU therefore, and calls `to` after that, which brings them to meta. It is known by what it has turned
// off: the gradients alone, where functions such as torch::empty turn off more.
bool is_called_by_torch_tensor() {
  const c10::DispatchKeySet off = c10::impl::tls_local_dispatch_key_set().excluded_;
  return off.has_any(c10::autograd_dispatch_keyset) && !off.has(c10::DispatchKey::ADInplaceOrView);
}

// Puts meta in the place of the device that the operator is asked for, if it is one that makes tensors.
void ask_for_meta(const c10::FunctionSchema& schema, torch::jit::Stack& stack) {
  const auto index = schema.argumentIndexWithName("device");
  if (!index || schema.name() == "aten::is_pinned") return;  // which is asked about another device
  c10::IValue& device = stack[stack.size() - schema.arguments().size() + static_cast<std::size_t>(*index)];
  if (schema.name() == "aten::empty" && device.isDevice() && is_called_by_torch_tensor()) return;
  device = at::Device(at::kMeta);
}

// Every operator that is called under MetaInit.
void call_on_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard ours_is_done(kKey);
  ask_for_meta(op.schema(), *stack);
  op.callBoxed(stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&call_on_meta>());
}

MetaInit::MetaInit() : before_(set_active(true)) {}
MetaInit::~MetaInit() { set_active(before_); }
MetaInit::Pause::Pause() : before_(set_active(false)) {}
MetaInit::Pause::~Pause() { set_active(before_); }

void materialize(const at::Tensor& meta, at::Device device) {
  constexpr char kWhat[] = "materialize a tensor";
  if (!meta.defined()) fail(ErrorCode::invalid_argument, "{}: it is undefined", kWhat);
  if (!meta.is_meta()) return;
  if (device.is_meta()) fail(ErrorCode::invalid_argument, "{}: on meta, expected a device with memory", kWhat);
  if (meta.layout() != at::kStrided || meta.is_quantized()) {
    fail(ErrorCode::unsupported, "{}: it is {}, expected a strided one", kWhat,
         meta.is_quantized() ? "quantized" : "not strided");
  }
  if (!meta.is_leaf()) {
    fail(ErrorCode::invalid_argument, "{}: it was computed from tensors that need gradients, expected a leaf", kWhat);
  }
  const c10::InferenceMode mode(meta.is_inference());
  const MetaInit::Pause pause;
  const at::Tensor made = at::empty_like(meta, meta.options().device(device).requires_grad(false));
  if (meta.grad().defined()) meta.mutable_grad().reset();
  // What follows is Tensor::set_data, which refuses to go from meta to another device.
  if (torch::autograd::AutogradMeta* autograd = torch::autograd::impl::get_autograd_meta(meta)) {
    const std::lock_guard lock(autograd->mutex_);
    autograd->grad_accumulator_.reset();  // it knows the device
  }
  meta.unsafeGetTensorImpl()->shallow_copy_from(made.getIntrusivePtr());
}

}  // namespace tessera::fsdp
