#include "tessera/fsdp/saved_tensors.h"

#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/fsdp/flat_param_handle.h"

namespace tessera::fsdp {

namespace {

using torch::autograd::Engine;

thread_local std::vector<PackHook> hooks_of_thread;

class Saved : public torch::autograd::SavedVariableHooks {
 public:
  explicit Saved(PackHook pack) : pack_(std::move(pack)) {}
  void call_pack_hook(const at::Tensor& tensor) override { unpack_ = std::exchange(pack_, nullptr)(tensor); }
  at::Tensor call_unpack_hook() override { return unpack_(); }

 private:
  PackHook pack_;  // until it was called
  std::function<at::Tensor()> unpack_;
};

class EngineWithHooks : public Engine {
 public:
  static Engine& instance() {
    static auto& engine = *new EngineWithHooks;  // its threads end with the process
    return engine;
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (hooks_of_thread.empty()) return nullptr;
    return std::make_unique<Saved>(hooks_of_thread.back());
  }
};

void use_engine_with_hooks() {
  static const bool has_replaced = [] {
    if (&Engine::get_default_engine() != &Engine::get_base_engine()) {
      fail(ErrorCode::unsupported,
           "hooks of saved tensors: this process has another autograd engine, expected LibTorch's own: use that one's "
           "hooks, such as torch.autograd.graph.saved_tensors_hooks");
    }
    torch::autograd::set_default_engine_stub(&EngineWithHooks::instance);
    return true;
  }();
  static_cast<void>(has_replaced);
}

// Returns whether the tensor is a parameter or a view of one. That of a sharded model may be frozen.
bool is_parameter(const at::Tensor& tensor) {
  const at::Tensor base = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
  return base.is_leaf() && (base.requires_grad() || FlatParamHandle::has(base));
}

}  // namespace

SavedTensorHooks::SavedTensorHooks(PackHook pack) {
  if (!pack) fail(ErrorCode::invalid_argument, "hooks of saved tensors: the hook is null, expected a function");
  use_engine_with_hooks();
  hooks_of_thread.push_back(std::move(pack));
}

SavedTensorHooks::~SavedTensorHooks() { hooks_of_thread.pop_back(); }

PackHook save_on_cpu(bool pin_memory) {
  return [pin_memory](const at::Tensor& saved) -> std::function<at::Tensor()> {
    at::Tensor tensor = saved.detach();
    if (tensor.is_cpu() || is_parameter(saved)) return [tensor = std::move(tensor)] { return tensor; };
    const bool pins = pin_memory && tensor.is_cuda() && tensor.layout() == at::kStrided;
    const at::Tensor on_cpu =
        at::empty_like(tensor, tensor.options().device(at::kCPU).pinned_memory(pins)).copy_(tensor);
    return [on_cpu, device = tensor.device(), pins] {
      return on_cpu.to(device, on_cpu.scalar_type(), /*non_blocking=*/pins);
    };
  };
}

}  // namespace tessera::fsdp
