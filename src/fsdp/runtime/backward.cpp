// Backward: when the backward of a unit is over, and how that of the model ends.
//
// A backward of the model begins when autograd reaches a result of one of its calls, or repeats a checkpointed one. It
// ends with the backward of the program that this is in, the outermost one if checkpointed calls are repeated.
//
// A unit is open from the moment when backward has reached a call of it. Its backward is over when
//   - the engine has passed its open calls: it has reached a result, an argument or the repetition of a call, at a
//     position (CheckpointedRun) before those where the open calls began, and
//   - no call of it is ahead: one whose result is in the graph that the engine runs, or that is being repeated;
// or at the end of backward. It is completed then: resharded, and its reduction started. Units are completed from the
// last called to the first.
//
// Why: among the nodes that are ready, the engine runs the one that was created last, but nodes that accumulate a
// gradient immediately. So when it comes to a position, all gradients of calls that began after it have arrived, or
// never will. A backward inside of the model's, for example in a hook, may run anything at any time. What it reaches
// completes only units that it has opened itself. Repeated calls are such backwards at the position of the first run.
//
// All ranks complete the same units at the same calls, because they run the same graphs. What may differ between ranks
// has no influence: which parameters of a unit have gradients and when these arrive, what else a program keeps or
// drops, forwards without a backward. A unit whose gradient was accumulated under no_sync, and that the next backward
// does not reach, is reduced at its end.

#include <c10/core/GradMode.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "fsdp/runtime/checkpointed_run.h"
#include "fsdp/runtime/runtime.h"
#include "tessera/base/error.h"
#include "tessera/comm/internal/step.h"

namespace tessera::fsdp {

namespace {

constexpr std::chrono::seconds kUntilNoticed(1);  // see Backward::has_failed

}  // namespace

// A backward of the model, and whether it has failed.
class Runtime::Backward {
 public:
  // Identifies the backward of the program.
  const void* const of_program = CheckpointedRun::outermost_backward();

  // Keeps the first reason.
  void set_reason(const std::exception_ptr& why) {
    const std::lock_guard lock(mutex_);
    if (!why_) why_ = why;
  }
  // Autograd destroys the callback that ends the backward, without calling it. On a device, a thread of autograd may do
  // so after another one has thrown the exception.
  void set_failed(const std::vector<ProcessGroup>& groups) {
    constexpr std::string_view kStep = "backward of a sharded model";
    const std::lock_guard lock(mutex_);
    for (const ProcessGroup& group : groups) {
      if (why_) {
        comm::leave_step(group, kStep, why_);
      } else {
        comm::leave_step(group, kStep, std::string_view("an exception in autograd"));
      }
    }
    has_failed_ = true;
    changed_.notify_all();
  }
  // A thread that computes no backward waits until a failure is noticed.
  bool has_failed() {
    std::unique_lock lock(mutex_);
    if (current_backward() == nullptr) changed_.wait_for(lock, kUntilNoticed, [this] { return has_failed_; });
    return has_failed_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_failed_ = false;
  std::exception_ptr why_;
};

// Ends a backward, or notices that it has thrown.
class Runtime::BackwardEnd {
 public:
  explicit BackwardEnd(Runtime& runtime)
      : runtime_(runtime), alive_(runtime.alive_), backward_(runtime.last_backward_) {}
  ~BackwardEnd() {
    if (!has_ended_ && *alive_) backward_->set_failed(runtime_.groups_);
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
  std::shared_ptr<Backward> backward_;
  bool has_ended_ = false;
};

void Runtime::hook_output(const std::shared_ptr<Call>& call, const at::Tensor& tensor) {
  const GraphNode result = node_of(tensor);
  if (call->results.empty() && !call->is_repeated) call->unit.calls.push_back(call);
  call->results.push_back(weak_reference(result));
  tensor.register_hook([this, alive = alive_, call, node = weak_reference(result)](const at::Tensor& /*gradient*/) {
    if (!*alive) {
      fail(
          ErrorCode::invalid_argument,
          "backward: the FullyShardedDataParallel that computed this result was destroyed, or is a part of another one "
          "since, expected backward before");
    }
    in_backward([&] {
      const GraphNode running = node.lock();
      pre_backward(call, running.get());
    });
  });
}

// The hook is one of the node. A hook of the tensor would follow it where the call changes it in place. Nodes that run
// on another device are ordered otherwise, as are leaves, whose gradients are accumulated immediately.
void Runtime::hook_input(const std::shared_ptr<Call>& call, const at::Tensor& tensor) {
  const FlatParamHandle* handle = call->unit.handle();
  if (handle == nullptr || !c10::GradMode::is_enabled() || !tensor.requires_grad() || tensor.is_leaf()) return;
  if (tensor.device().type() != handle->options().device.type()) return;
  before_node(node_of(tensor), [this, alive = alive_, begin = call->begin] {
    if (!*alive || !in_backward_ || last_backward_->has_failed()) return;
    const OnComputation on(*streams_);
    in_backward([&] { complete_after(begin - 1); });
  });
}

void Runtime::pre_backward(const std::shared_ptr<Call>& call, const torch::autograd::Node* node) {
  RECORD_USER_SCOPE("FullyShardedDataParallel.pre_backward");
  const bool creates_graph = c10::GradMode::is_enabled();
  const c10::NoGradGuard no_grad;
  recover();
  if (!in_backward_) begin_backward(node);
  if (creates_graph) {
    fail(ErrorCode::unsupported,
         "backward of a sharded model: create_graph is true, expected false: gradients of gradients need parameters "
         "that are sharded again by then");
  }
  if (call->reached_in == backward_) return;                   // another result of the same call
  if (call->expected_in != backward_) find_calls_ahead(node);  // a backward inside of this one has begun
  complete_after(call->end);
  call->reached_in = backward_;
  call->is_nested = is_nested();
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

// `node` is the one that runs; null if it is a repetition.
void Runtime::begin_backward(const torch::autograd::Node* node) {
  if (in_forward_) {
    fail(ErrorCode::unsupported,
         "backward of a sharded model: called in forward of the model, whose units are in use, expected it after that");
  }
  in_backward_ = true;
  ++backward_;
  last_backward_ = std::make_shared<Backward>();
  CheckpointedRun::at_end_of_outermost_backward([end = std::make_shared<BackwardEnd>(*this)] { end->end(); });
  write_back_before_backward();
  begin_step();
  find_calls_ahead(node);
}

// Finds the calls that the backward of this thread will reach.
void Runtime::find_calls_ahead(const torch::autograd::Node* node) {
  const auto is_reached = [&](const WeakGraphNode& result) {
    const GraphNode of_result = result.lock();
    return of_result && is_run_by_current_backward(of_result.get(), node);
  };
  for (Unit* unit : units_) {
    for (const std::weak_ptr<Call>& each : unit->calls) {
      const std::shared_ptr<Call> call = each.lock();
      if (call && std::any_of(call->results.begin(), call->results.end(), is_reached)) call->expected_in = backward_;
    }
  }
}

void Runtime::note_failure(const std::exception_ptr& why) noexcept {
  if (last_backward_) last_backward_->set_reason(why);
}

template <typename F>
void Runtime::in_backward(const F& f) {
  try {
    f();
  } catch (...) {
    note_failure(std::current_exception());
    throw;
  }
}

// Returns whether this thread computes a backward inside of the model's, rather than that itself.
bool Runtime::is_nested() const { return current_backward() != last_backward_->of_program; }

void Runtime::open(const std::shared_ptr<Call>& call) {
  Unit& unit = call->unit;
  if (unit.open_calls.empty()) {
    const auto after = std::find_if(open_.begin(), open_.end(),
                                    [&](Unit* other) { return other->open_calls.front()->first > call->first; });
    open_.insert(after, &unit);
  }
  unit.open_calls.push_back(call);
}

// Completes the units whose backward is over. Called when the engine has come to `position`.
void Runtime::complete_after(std::uint64_t position) {
  const auto is_passed = [position, is_nested = is_nested()](const std::shared_ptr<Call>& call) {
    return call->begin > position && (call->is_nested || !is_nested);
  };
  const auto is_over = [&](const Unit& unit) {
    return std::all_of(unit.open_calls.begin(), unit.open_calls.end(), is_passed) && !unit.has_call_ahead(backward_);
  };
  while (!open_.empty() && is_over(*open_.back())) {
    Unit& unit = *open_.back();
    complete(unit);
    if (options_.backward_prefetch == BackwardPrefetch::post) prefetch_backward(unit);
  }
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
  const bool is_last = unit.open_calls.empty() && !unit.awaits_reduction && !unit.has_call_ahead(backward_);
  if (is_last && !unit.may_be_repeated) call_post_reduce_hook(unit);
}

// Called once in a backward, after the last reduction of the unit. The hook may change the parameters, so backward must
// no longer need them.
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
  while (!reducing_.empty()) finish_oldest_reduction();
  for (Unit* unit : units_) {
    reshard_after_backward(*unit);
    unit->handle()->set_training_state(TrainingState::idle);
    unit->use_accumulators(false);
    call_post_reduce_hook(*unit);
    if (unit->prepared_in == backward_) unit->handle()->prepare_gradient_for_optim();
  }
  end_step();
  in_backward_ = false;
}

void Runtime::recover() {
  if (!in_backward_ || !last_backward_->has_failed()) return;
  const c10::NoGradGuard no_grad;
  abandon();
}

// Ends a backward without completing it. Gradients of the units that it has reached are incomplete, so they are freed.
void Runtime::abandon() {
  in_backward_ = false;
  open_.clear();
  for (Unit* unit : std::exchange(reducing_, {})) {
    try {
      unit->handle()->finish_reduce_gradient();
    } catch (...) {
      // The result is not needed. If the group is broken, the next collective throws.
    }
  }
  for (Unit* unit : units_) {
    unit->open_calls.clear();
    unit->is_kept = false;
    unit->handle()->reshard();
    unit->handle()->set_training_state(TrainingState::idle);
    unit->use_accumulators(false);
    if (unit->prepared_in != backward_) continue;
    unit->awaits_reduction = unit->awaits_hook = false;
    unit->handle()->flat_param().mutable_grad().reset();
    for (const at::Tensor& param : unit->handle()->params()) param.mutable_grad().reset();
    unit->handle()->drop_reset_gradients();
  }
  end_step();
}

}  // namespace tessera::fsdp
