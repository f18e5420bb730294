#include <c10/core/GradMode.h>

#include <optional>

#include "fsdp/runtime/runtime.h"
#include "tessera/fsdp/wrap.h"

namespace tessera::fsdp {

struct UnitCall::State {
  explicit State(Unit& unit_in) : unit(unit_in), runtime(unit_in.runtime()) {
    if (range.isActive()) range.before("FullyShardedDataParallel.forward " + unit.name());
  }

  Unit& unit;
  Runtime& runtime;
  at::RecordFunction range{at::RecordScope::USER_SCOPE};  // for profilers
  std::shared_ptr<Call> call;                             // null while the model is summoned
  std::optional<OpObserver> observer;                     // during forward of the model
  bool has_ended = false;
};

UnitCall::UnitCall(Unit& unit) : state_(std::make_unique<State>(unit)) {
  Runtime& runtime = state_->runtime;
  if (runtime.is_summoned) {
    runtime.check_summoned(unit);
    return;
  }
  const UnobservedOps unobserved;
  runtime.implicit_calls()->finish();
  state_->call = runtime.begin_call(unit, c10::GradMode::is_enabled());
  unit.running_calls.push_back(state_->call.get());
  if (&unit == &runtime.root()) state_->observer.emplace(runtime.implicit_calls());
}

UnitCall::~UnitCall() {
  if (!state_->call) return;
  state_->unit.running_calls.pop_back();
  if (state_->has_ended) return;
  const UnobservedOps unobserved;
  state_->runtime.implicit_calls()->abandon();
  try {
    state_->runtime.abandon_call(state_->call);
  } catch (...) {
    // A prefetched unit did not arrive: the group is broken, and the exception that `forward` threw is on its way.
  }
}

void UnitCall::rethrow() {
  std::exception_ptr why = std::current_exception();
  if (state_->call) {
    if (std::exception_ptr first = state_->runtime.implicit_calls()->abandon()) why = std::move(first);
    state_->runtime.report_failure(state_->unit, why);
  }
  std::rethrow_exception(why);
}

void UnitCall::input(at::Tensor& tensor) {
  if (!state_->call) return;
  state_->runtime.hook_input(state_->call, tensor);
  state_->runtime.cast_input(state_->unit, tensor);
}

void UnitCall::output(at::Tensor& tensor) {
  if (state_->call && c10::GradMode::is_enabled()) state_->runtime.hook_output(state_->call, tensor);
}

void UnitCall::end() {
  if (!state_->call) return;
  const UnobservedOps unobserved;
  state_->runtime.implicit_calls()->finish();
  state_->runtime.end_call(state_->call);
  state_->has_ended = true;
}

}  // namespace tessera::fsdp
