#include <c10/core/GradMode.h>

#include "fsdp/runtime/runtime.h"
#include "tessera/fsdp/wrap.h"

namespace tessera::fsdp {

struct UnitCall::State {
  Runtime& runtime;
  std::shared_ptr<Call> call;  // null while the model is summoned
  bool has_gradient = false, has_ended = false;
};

UnitCall::UnitCall(Unit& unit) {
  Runtime& runtime = unit.runtime();
  state_ = std::make_unique<State>(State{runtime, runtime.is_summoned ? nullptr : runtime.begin_call(unit)});
}

UnitCall::~UnitCall() {
  if (!state_->call || state_->has_ended) return;
  try {
    state_->runtime.abandon_call(state_->call);
  } catch (...) {
    // A prefetched unit did not arrive: the group is broken, and the exception that `forward` threw is on its way.
  }
}

void UnitCall::fail() noexcept {
  if (state_->call) state_->runtime.leave_forward(state_->call->unit);
}

void UnitCall::input(at::Tensor& tensor) {
  if (state_->call) state_->runtime.cast_input(state_->call->unit, tensor);
}

void UnitCall::output(at::Tensor& tensor) {
  if (!state_->call || !c10::GradMode::is_enabled() || !tensor.requires_grad()) return;
  state_->has_gradient = true;
  state_->runtime.hook_output(state_->call, tensor);
}

void UnitCall::end() {
  if (state_->call) state_->runtime.end_call(state_->call, state_->has_gradient);
  state_->has_ended = true;
}

}  // namespace tessera::fsdp
