// Backward: when the backward of a unit is over, and how that of the model ends.
//
// A backward of the model begins when autograd reaches a result of one of its calls, or repeats a checkpointed one. It
// ends with the backward of the program that this is in, the outermost one if checkpointed calls are repeated.
//
// A call is reached when a node that it has made for a result runs. If the result is a view, its base has another node.
// After the view was changed in place, backward runs that node, and not the view's own. A tensor that the call returns
// and has not computed, such as an argument or a parameter, is no result.
//
// A traversal is a backward that reaches calls, together with those of the calls that it repeats, which are at the
// positions of the first run (CheckpointedRun). In the middle of it, a hook may compute another backward, a traversal
// inside of it.
//
// A unit is open from the moment when backward has reached a call of it. Its backward is over when
//   - its open calls have been passed: the traversal that has reached them has come to a result, an argument or the
//     repetition of a call, at a position before those where they began, or has ended; and
//   - no call of it is ahead: one whose result is in the graph of a traversal, or that was repeated for its backward;
// or at the end of backward. It is completed then: resharded, and its reduction started. Units are completed from the
// last called to the first. A traversal passes what it and those inside of it have reached, and nothing else.
//
// Why: among the nodes that are ready, the engine runs the one that was created last, but nodes that accumulate a
// gradient immediately. So when it comes to a position, all gradients of calls that began after it have arrived, or
// never will. A traversal inside of another one begins anywhere and may run anything, so positions mean nothing to the
// other one before it has ended.
//
// All ranks complete the same units at the same calls, because they run the same graphs. What may differ between ranks
// has no influence: which parameters of a unit have gradients and when these arrive, what else a program keeps or
// drops, forwards without a backward. A unit whose gradient was accumulated under no_sync, and that the next backward
// does not reach, is reduced at its end.

#include <c10/core/GradMode.h>

#include <algorithm>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <thread>
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
  // Keeps the first reason.
  void set_reason(const std::exception_ptr& why) {
    const std::lock_guard lock(mutex_);
    if (why_) return;
    why_ = why;
    thread_ = std::this_thread::get_id();
  }
  // Called where backward continues. If this thread had a reason to leave it, the program has handled that.
  void drop_reason() {
    const std::lock_guard lock(mutex_);
    if (thread_ == std::this_thread::get_id()) why_ = nullptr;
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
  std::thread::id thread_;  // where it was thrown
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
  const auto hook = [&](const at::Tensor& result) {
    if (!result.requires_grad() || result.is_leaf()) return;
    if (const GraphNode node = node_of(result); !is_older(node, call->first_node)) hook_node(call, node);
  };
  if (!tensor.requires_grad()) return;
  hook(tensor);
  if (tensor.is_view()) hook(at::Tensor(tensor._base()));
}

void Runtime::hook_node(const std::shared_ptr<Call>& call, const GraphNode& node) {
  const auto hook = [this, alive = alive_, call, running = node.get()] {
    if (!*alive) {
      fail(
          ErrorCode::invalid_argument,
          "backward: the FullyShardedDataParallel that computed this result was destroyed, or is a part of another one "
          "since, expected backward before");
    }
    in_backward([&] { pre_backward(call, running); });
  };
  if (!before_node_and_later_hooks(node, call, hook)) return;
  if (call->results.empty() && !call->is_repeated) call->unit.calls.push_back(call);
  call->results.push_back(weak_reference(node));
}

// The hook is one of the node. A hook of the tensor would follow it where the call changes it in place. Nodes that run
// on another device are ordered otherwise, as are leaves, whose gradients are accumulated immediately. Of several calls
// that take the tensor, the first has the hook: the others began after it.
void Runtime::hook_input(const std::shared_ptr<Call>& call, const at::Tensor& tensor) {
  const FlatParamHandle* handle = call->unit.handle();
  if (handle == nullptr || !c10::GradMode::is_enabled() || !tensor.requires_grad() || tensor.is_leaf()) return;
  if (tensor.device().type() != handle->options().device.type()) return;
  const GraphNode node = node_of(tensor);
  before_node(node, alive_, [this, alive = alive_, begin = call->begin, running = node.get()] {
    if (!*alive || !in_backward_ || last_backward_->has_failed()) return;
    const OnComputation on(*streams_);
    in_backward([&] { complete_after(begin - 1, traversal(running).number); });
  });
}

void Runtime::pre_backward(const std::shared_ptr<Call>& call, const torch::autograd::Node* node) {
  RECORD_USER_SCOPE("FullyShardedDataParallel.pre_backward");
  const bool creates_graph = c10::GradMode::is_enabled();
  const c10::NoGradGuard no_grad;
  recover();
  if (!in_backward_) begin_backward(node, call->in_full_precision);
  if (creates_graph) {
    fail(ErrorCode::unsupported,
         "backward of a sharded model: create_graph is true, expected false: gradients of gradients need parameters "
         "that are sharded again by then");
  }
  Traversal& now = traversal(node);
  const std::uint64_t number = now.number;
  if (now.calls.count(call) == 0) find_calls_ahead(now, node);  // the backward of a repeated call has begun
  if (!now.calls.emplace(call, true).first->second) return;     // another result of the same call
  complete_after(call->end, number);                            // but not the unit of this call, which is ahead
  traversal(node).calls[call] = call->awaits_backward = false;
  Unit& unit = call->unit;
  if (unit.handle() == nullptr) return;
  check_precision(*call);
  if (std::find(unit.open_calls.begin(), unit.open_calls.end(), call) != unit.open_calls.end()) {
    call->reached_by = std::min(call->reached_by, number);  // a traversal inside of this one has reached it
    return;
  }
  call->reached_by = number;
  open(call);
  unit.handle()->set_training_state(TrainingState::backward_pre);
  if (std::exchange(unit.was_shown, false) || unit.prepared_in != backward_) {
    finish_reductions_of(unit);
    unit.handle()->prepare_gradient_for_backward();
  }
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

// Throws Error(unsupported) if backward has reached calls in another precision: a unit is unsharded in one at a time.
void Runtime::check_precision(const Call& call) const {
  const bool is_either = !call.unit.handle()->options().mixed_precision.param_dtype;
  if (is_either || call.in_full_precision == in_full_precision_) return;
  fail(ErrorCode::unsupported,
       "backward of a sharded model: it contains calls in training and in evaluation, which has full precision "
       "(FSDP_USE_FULL_PREC_IN_EVAL), expected a backward for each");
}

// `node` is the one that runs; null if it is a repetition.
void Runtime::begin_backward(const torch::autograd::Node* node, bool in_full_precision) {
  if (in_forward_) {
    fail(ErrorCode::unsupported,
         "backward of a sharded model: called in forward of the model, whose units are in use, expected it after that");
  }
  in_backward_ = true;
  ++backward_;
  last_backward_ = std::make_shared<Backward>();
  traversals_.clear();
  const auto end = std::make_shared<BackwardEnd>(*this);
  CheckpointedRun::at_end_of_outermost_backward([end] { end->end(); });
  const bool has_another_precision = use_full_precision(in_full_precision);  // a forward in another one came between
  write_back_before_backward();
  if (has_another_precision) {
    cast_buffers(/*own_dtype=*/in_full_precision_);
    for (Unit* unit : units_) {
      unit->renew_accumulators();
      unit->use_accumulators(false);
    }
  }
  begin_step();
  begin_traversal(end, node);
}

// Returns the traversal of this thread. `node` is the one that runs, null if there is none.
Runtime::Traversal& Runtime::traversal(const torch::autograd::Node* node) {
  const void* const of = CheckpointedRun::outermost_backward();
  if (of == nullptr) return traversals_.front();
  const auto is_it = [of](const Traversal& each) { return each.of == of && !each.end.expired(); };
  const auto found = std::find_if(traversals_.begin(), traversals_.end(), is_it);
  if (found != traversals_.end()) {
    traversals_.erase(found + 1, traversals_.end());  // those inside of it have ended, maybe by an exception
    return traversals_.back();
  }
  std::erase_if(traversals_, [](const Traversal& each) { return each.end.expired(); });
  const auto end = std::make_shared<const std::uint64_t>(traversal_count_ + 1);
  CheckpointedRun::at_end_of_outermost_backward([this, alive = alive_, end] {
    if (*alive) end_traversal(*end);
  });
  begin_traversal(end, node);
  return traversals_.back();
}

void Runtime::begin_traversal(const std::weak_ptr<const void>& end, const torch::autograd::Node* node) {
  traversals_.push_back({CheckpointedRun::outermost_backward(), end, ++traversal_count_, {}});
  find_calls_ahead(traversals_.back(), node);
}

// Passes what a traversal inside of another one has reached.
void Runtime::end_traversal(std::uint64_t number) {
  const auto is_it = [number](const Traversal& each) { return each.number == number; };
  const auto found = std::find_if(traversals_.begin(), traversals_.end(), is_it);
  if (found == traversals_.end() || last_backward_->has_failed()) return;
  found->calls.clear();
  for (const Unit* unit : open_) {
    for (const std::shared_ptr<Call>& call : unit->open_calls) {
      if (call->reached_by >= number) call->reached_by = Call::kHasEnded;
    }
  }
  const OnComputation on(*streams_);
  in_backward([&] { complete_after(std::numeric_limits<std::uint64_t>::max(), number); });
  std::erase_if(traversals_, [number](const Traversal& each) { return each.number >= number; });
}

// Finds the calls that the backward of this thread will reach.
void Runtime::find_calls_ahead(Traversal& in, const torch::autograd::Node* node) const {
  const auto is_reached = [&](const WeakGraphNode& result) {
    const GraphNode of_result = result.lock();
    return of_result && is_run_by_current_backward(of_result.get(), node);
  };
  for (const Unit* unit : units_) {
    for (const std::weak_ptr<Call>& each : unit->calls) {
      const std::shared_ptr<Call> call = each.lock();
      if (call && std::any_of(call->results.begin(), call->results.end(), is_reached)) in.calls.emplace(call, true);
    }
  }
}

// Returns whether this backward will reach further calls of the unit.
bool Runtime::has_call_ahead(const Unit& unit) const {
  return std::any_of(unit.calls.begin(), unit.calls.end(), [&](const std::weak_ptr<Call>& each) {
    const std::shared_ptr<const Call> call = each.lock();
    return call &&
           (call->awaits_backward || std::any_of(traversals_.begin(), traversals_.end(), [&](const Traversal& in) {
              const auto found = in.calls.find(each);
              return found != in.calls.end() && found->second;
            }));
  });
}

void Runtime::note_failure(const std::exception_ptr& why) noexcept {
  if (last_backward_) last_backward_->set_reason(why);
}

template <typename F>
void Runtime::in_backward(const F& f) {
  if (last_backward_) last_backward_->drop_reason();
  try {
    f();
  } catch (...) {
    note_failure(std::current_exception());
    throw;
  }
}

void Runtime::open(const std::shared_ptr<Call>& call) {
  Unit& unit = call->unit;
  if (unit.open_calls.empty()) {
    const auto after = std::find_if(open_.begin(), open_.end(),
                                    [&](Unit* other) { return other->open_calls.front()->first > call->first; });
    open_.insert(after, &unit);
  }
  unit.open_calls.push_back(call);
}

// Completes the units whose backward is over. Called when the traversal with this number has come to `position`.
void Runtime::complete_after(std::uint64_t position, std::uint64_t number) {
  const auto is_passed = [=](const std::shared_ptr<Call>& call) {
    return call->reached_by == Call::kHasEnded || (call->reached_by >= number && call->begin > position);
  };
  const auto is_over = [&](const Unit& unit) {
    return std::all_of(unit.open_calls.begin(), unit.open_calls.end(), is_passed) && !has_call_ahead(unit);
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

void Runtime::finish_reductions_of(const Unit& unit) {
  while (std::find(reducing_.begin(), reducing_.end(), &unit) != reducing_.end()) finish_oldest_reduction();
}

void Runtime::start_reduction(Unit& unit) {
  finish_reductions_of(unit);
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
  const bool is_last = unit.open_calls.empty() && !unit.awaits_reduction && !has_call_ahead(unit);
  if (is_last && !unit.may_be_repeated) call_post_reduce_hook(unit);
}

// Called after the last reduction of the unit, as far as that is known. The hook may change the parameters, so backward
// must no longer need them.
void Runtime::call_post_reduce_hook(Unit& unit) {
  if (!std::exchange(unit.awaits_hook, false) || !post_reduce_hook) return;
  if (unit.handle()->is_unsharded()) reshard_after_backward(unit);  // a hook of the program has called it
  unit.handle()->prepare_gradient_for_optim();
  unit.was_shown = true;
  post_reduce_hook(static_cast<std::size_t>(std::find(units_.begin(), units_.end(), &unit) - units_.begin()));
  if (!unit.was_shown) return;  // a backward in the hook has reached the unit
  unit.handle()->write_back_params();
  unit.handle()->adopt_visible_gradients();
}

void Runtime::prefetch_backward(const Unit& unit) {
  const auto found = std::find(ended_.rbegin(), ended_.rend(), &unit);
  if (found == ended_.rend()) return;
  const auto count = std::min<std::ptrdiff_t>(ended_.rend() - found - 1, options_.max_prefetched_units);
  std::for_each(found + 1, found + 1 + count, [this](Unit* next) { prefetch(*next); });
}

// Completes and reduces what is left.
void Runtime::complete_all() {
  while (!open_.empty()) complete(*open_.back());
  for (Unit* unit : units_) {
    if (!syncs_gradients || !unit->awaits_reduction) continue;
    unit->handle()->adopt_visible_gradients();
    unit->prepared_in = backward_;
    unit->was_shown = true;
    start_reduction(*unit);
  }
  while (!reducing_.empty()) finish_oldest_reduction();
}

// Hooks are a part of backward, so they may call the model. That leaves units unsharded.
void Runtime::end_backward() {
  const c10::NoGradGuard no_grad;
  complete_all();
  for (Unit* unit : units_) {
    finish_reductions_of(*unit);
    call_post_reduce_hook(*unit);
  }
  complete_all();
  for (Unit* unit : units_) {
    reshard_after_backward(*unit);
    unit->handle()->set_training_state(TrainingState::idle);
    unit->use_accumulators(false);
    unit->awaits_hook = false;
    if (unit->prepared_in == backward_) unit->handle()->prepare_gradient_for_optim();
  }
  end_step();
  traversals_.clear();
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
  traversals_.clear();
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
