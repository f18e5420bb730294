// Backward: when units are unsharded again and completed, and how a backward ends.

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "fsdp/runtime/checkpointed_run.h"
#include "fsdp/runtime/runtime.h"
#include "tessera/base/error.h"
#include "tessera/comm/internal/step.h"

namespace tessera::fsdp {

void Runtime::hook_output(const std::shared_ptr<Call>& call, const at::Tensor& tensor) {
  tensor.register_hook([this, alive = alive_, call](const at::Tensor& /*gradient*/) {
    if (!*alive) {
      fail(
          ErrorCode::invalid_argument,
          "backward: the FullyShardedDataParallel that computed this result was destroyed, or is a part of another one "
          "since, expected backward before");
    }
    in_backward([&] { pre_backward(call); });
  });
}

void Runtime::pre_backward(const std::shared_ptr<Call>& call) {
  RECORD_USER_SCOPE("FullyShardedDataParallel.pre_backward");
  const bool creates_graph = c10::GradMode::is_enabled();
  const c10::NoGradGuard no_grad;
  recover();
  if (!in_backward_) begin_backward();
  if (creates_graph) {
    fail(ErrorCode::unsupported,
         "backward of a sharded model: create_graph is true, expected false: gradients of gradients need parameters "
         "that are sharded again by then");
  }
  if (call->backward == backward_) return;  // another result of the same call
  call->backward = backward_;
  complete_after(call->end);
  Unit& unit = call->unit;
  if (unit.handle() == nullptr) return;
  open(call);
  unit.handle()->set_training_state(TrainingState::backward_pre);
  if (unit.prepared_in != backward_) unit.handle()->prepare_gradient_for_backward();
  unit.prepared_in = backward_;
  unshard_for_call(unit);
  unit.use_accumulators(true);  // for calls that are repeated
  if (options_.backward_prefetch == BackwardPrefetch::pre) prefetch_backward(unit);
}

// Notices that a backward has ended by an exception: autograd destroys its callbacks then, without calling them.
class Runtime::BackwardEnd {
 public:
  BackwardEnd(Runtime& runtime, std::shared_ptr<bool> alive) : runtime_(runtime), alive_(std::move(alive)) {}
  ~BackwardEnd() {
    if (has_ended_ || !*alive_) return;
    runtime_.has_backward_failed_ = true;
    const std::string& why = runtime_.why_backward_failed_;
    for (const ProcessGroup& group : runtime_.groups_) {
      comm::leave_step(group, "backward of a sharded model", why.empty() ? "an exception in autograd" : why);
    }
  }
  BackwardEnd(const BackwardEnd&) = delete;
  BackwardEnd& operator=(const BackwardEnd&) = delete;
  void end() {
    if (*alive_) {
      runtime_.in_backward([this] {
        runtime_.end_backward();
        runtime_.meet();
      });
    }
    has_ended_ = true;
  }

 private:
  Runtime& runtime_;
  std::shared_ptr<bool> alive_;
  bool has_ended_ = false;
};

// Data that was assigned to parameters after forward is that of backward, too, where it gathers them again.
void Runtime::write_back_before_backward() {
  for (Unit* unit : units_) {
    const bool wrote = unit->handle()->write_back_params();
    if (!unit->handle()->is_stale() && (!wrote || is_sharded(unit->handle()->options().strategy))) continue;
    fail(ErrorCode::invalid_argument,
         "backward: data was assigned to parameters of {} after forward, expected none: they are not gathered again",
         unit->quoted_name());
  }
}

void Runtime::begin_backward() {
  in_backward_ = true;
  ++backward_;
  why_backward_failed_.clear();
  at_end_of_backward([end = std::make_shared<BackwardEnd>(*this, alive_)] { end->end(); });
  write_back_before_backward();
  begin_step();
}

template <typename F>
void Runtime::in_backward(const F& f) {
  try {
    f();
  } catch (const std::exception& error) {
    if (why_backward_failed_.empty()) why_backward_failed_ = printable(std::string_view(error.what()).substr(0, 1000));
    throw;
  }
}

void Runtime::open(const std::shared_ptr<Call>& call) {
  Unit& unit = call->unit;
  call->ahead.reset();
  const bool is_first = unit.open_calls.empty();
  if (is_first) {
    const auto after = std::find_if(open_.begin(), open_.end(),
                                    [&](Unit* other) { return other->open_calls.front()->first > call->first; });
    open_.insert(after, &unit);
  }
  // Gradients of several graphs cannot be told apart.
  if (!is_first && (call->has_own_graph || unit.open_calls.back()->has_own_graph)) call->tells_end = false;
  unit.open_calls.push_back(call);
  if (const auto& accumulators = call->accumulators) {
    if (is_first || accumulators->backward != backward_ || accumulators->waiting == 0) {
      accumulators->waiting = accumulators->nodes.size();
    }
    accumulators->backward = backward_;
  }
}

void Runtime::complete_done_units() {
  while (!open_.empty() && open_.back()->is_done()) complete(*open_.back());
}

// Called when the engine has reached a result of a call that ended at `end`.
void Runtime::complete_after(std::uint64_t end) {
  const auto is_over = [&](const Unit& unit) {
    return unit.calls_ahead() == 0 && std::all_of(unit.open_calls.begin(), unit.open_calls.end(),
                                                  [&](const auto& call) { return call->begin > end; });
  };
  while (!open_.empty() && (open_.back()->is_done() || is_over(*open_.back()))) complete(*open_.back());
}

void Runtime::complete(Unit& unit) {
  RECORD_USER_SCOPE("FullyShardedDataParallel.post_backward");
  const c10::NoGradGuard no_grad;
  FlatParamHandle& handle = *unit.handle();
  open_.erase(std::find(open_.begin(), open_.end(), &unit));
  unit.open_calls.clear();
  handle.set_training_state(TrainingState::backward_post);
  reshard_after_backward(unit);
  unit.use_accumulators(false);
  unit.awaits_reduction = unit.awaits_reduction || handle.requires_grad();
  if (syncs_gradients && unit.awaits_reduction) start_reduction(unit);
  if (options_.backward_prefetch == BackwardPrefetch::post) prefetch_backward(unit);
}

void Runtime::start_reduction(Unit& unit) {
  while (std::find(reducing_.begin(), reducing_.end(), &unit) != reducing_.end()) finish_oldest_reduction();
  unit.handle()->start_reduce_gradient();
  unit.awaits_reduction = false;
  reducing_.push_back(&unit);
  // The sum over the replicas of one unit overlaps with the sum within the group of the next one.
  if (options_.replicas && reducing_.size() > 1) reducing_[reducing_.size() - 2]->handle()->continue_reduce_gradient();
  while (reducing_.size() > (options_.replicas ? 2 : 1)) finish_oldest_reduction();
}

// Gradients that are not reduced leave the shards as they are, so that the next forward can use what is gathered. Units
// that are resharded after forward are not kept: it would take the memory that this saves. PyTorch:
// _should_free_in_backward.
void Runtime::reshard_after_backward(Unit& unit) {
  const ShardingStrategy strategy = unit.handle()->options().strategy;
  unit.is_kept =
      !syncs_gradients && unit.handle()->is_gathered() && is_sharded(strategy) && !reshards_after_forward(strategy);
  unit.handle()->reshard(/*frees_unsharded=*/!unit.is_kept);
}

void Runtime::finish_oldest_reduction() {
  RECORD_USER_SCOPE("FullyShardedDataParallel.reduce");
  Unit& unit = *reducing_.front();
  reducing_.pop_front();
  const auto begin = std::chrono::steady_clock::now();
  unit.handle()->finish_reduce_gradient();
  waited_ += std::chrono::steady_clock::now() - begin;
  unit.awaits_hook = true;
  if (unit.calls_ahead() == 0 && unit.open_calls.empty() && !unit.may_be_repeated) call_post_reduce_hook(unit);
}

// If an outer backward repeats calls of the model, it may do so several times: the hook is called at its end.
void Runtime::defer_hooks_of_repetition() {
  if (!post_reduce_hook || !CheckpointedRun::is_repeating()) return;
  at_end_of_backward([this, alive = alive_] {
    if (!*alive) return;
    const c10::NoGradGuard no_grad;
    for (Unit* unit : units_) call_post_reduce_hook(*unit);
  });
}

// The hook may change the parameters, so backward must no longer need them.
void Runtime::call_post_reduce_hook(Unit& unit) {
  if (!std::exchange(unit.awaits_hook, false) || !post_reduce_hook) return;
  unit.handle()->prepare_gradient_for_optim();
  post_reduce_hook(static_cast<std::size_t>(std::find(units_.begin(), units_.end(), &unit) - units_.begin()));
  unit.handle()->write_back_params();
  unit.handle()->adopt_visible_gradients();
}

void Runtime::prefetch_backward(const Unit& unit) {
  const auto found = std::find(ended_.rbegin(), ended_.rend(), &unit);
  if (found == ended_.rend()) return;
  const auto count = std::min<std::ptrdiff_t>(ended_.rend() - found - 1, options_.max_prefetched_units);
  std::for_each(found + 1, found + 1 + count, [this](Unit* next) { prefetch(*next); });
}

void Runtime::end_backward() {
  const c10::NoGradGuard no_grad;
  while (!open_.empty()) complete(*open_.back());
  for (Unit* unit : units_) {
    if (!syncs_gradients || !unit->awaits_reduction) continue;
    unit->handle()->adopt_visible_gradients();
    unit->prepared_in = backward_;
    start_reduction(*unit);
  }
  leave_backward();
}

void Runtime::leave_backward() {
  while (!reducing_.empty()) finish_oldest_reduction();
  for (Unit* unit : units_) {
    reshard_after_backward(*unit);
    unit->handle()->set_training_state(TrainingState::idle);
    unit->use_accumulators(false);
    if (!CheckpointedRun::is_repeating()) call_post_reduce_hook(*unit);
    if (unit->prepared_in == backward_) unit->handle()->prepare_gradient_for_optim();
  }
  end_step();
  in_backward_ = false;
}

void Runtime::recover() {
  if (!has_backward_failed_ || in_forward_) return;
  const c10::NoGradGuard no_grad;
  abandon();
}

// Ends a backward without completing it. Gradients of the units that it has reached are incomplete, so they are freed.
void Runtime::abandon() {
  has_backward_failed_ = false;
  open_.clear();
  for (Unit* unit : units_) unit->open_calls.clear();
  const auto hook = std::exchange(post_reduce_hook, nullptr);  // not of gradients that are incomplete
  leave_backward();
  for (Unit* unit : units_) {
    unit->is_kept = false;
    unit->handle()->free_unsharded();
    if (unit->prepared_in != backward_) continue;
    unit->awaits_reduction = unit->awaits_hook = false;
    unit->handle()->flat_param().mutable_grad().reset();
    for (const at::Tensor& param : unit->handle()->params()) param.mutable_grad().reset();
    unit->handle()->drop_reset_gradients();
  }
  post_reduce_hook = hook;
}

}  // namespace tessera::fsdp
