#include "tessera/fsdp/meta_init.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "tessera/base/error.h"
#include "tessera/tensor/internal/materialize.h"

namespace tessera::fsdp {

namespace {

constexpr c10::DispatchKey kKey = c10::DispatchKey::DeferredInit;

bool set_active(bool active) {
  const bool before = c10::impl::tls_is_dispatch_key_included(kKey);
  c10::impl::tls_set_dispatch_key_included(kKey, active);
  return before;
}

// Returns whether the caller is torch::tensor({...}) or similar. It writes the elements to the result of at::empty,
// which must therefore be on the CPU, and then moves it to meta by `to`. It is recognized by the dispatch keys that it
// has excluded: only those of autograd, whereas functions such as torch::empty exclude more.
bool is_called_by_torch_tensor() {
  const c10::DispatchKeySet off = c10::impl::tls_local_dispatch_key_set().excluded_;
  return off.has_any(c10::autograd_dispatch_keyset) && !off.has(c10::DispatchKey::ADInplaceOrView);
}

// Replaces the device argument of an operator that creates tensors by meta.
void set_device_to_meta(const c10::FunctionSchema& schema, torch::jit::Stack& stack) {
  const auto index = schema.argumentIndexWithName("device");
  if (!index || schema.name() == "aten::is_pinned") return;  // queries another device
  c10::IValue& device = stack[stack.size() - schema.arguments().size() + static_cast<std::size_t>(*index)];
  if (schema.name() == "aten::empty" && device.isDevice() && is_called_by_torch_tensor()) return;
  device = at::Device(at::kMeta);
}

// Called for every operator under MetaInit.
void call_on_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard exclude_this(kKey);
  set_device_to_meta(op.schema(), *stack);
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
  if (!meta.defined()) fail(ErrorCode::invalid_argument, "{}: it is undefined, expected a tensor", kWhat);
  if (!meta.is_meta()) return;
  if (device.is_meta()) fail(ErrorCode::invalid_argument, "{}: device is meta, expected a device with memory", kWhat);
  check_can_materialize(meta, kWhat);
  const MetaInit::Pause pause;
  materialize_in_place(meta, device);
}

}  // namespace tessera::fsdp
