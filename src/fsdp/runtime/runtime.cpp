#include "fsdp/runtime/runtime.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "fsdp/groups.h"
#include "fsdp/runtime/checkpointed_run.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/internal/step.h"

namespace tessera::fsdp {

void Runtime::check_has_all_params(std::string_view function) const {
  if (has_all_params_) return;
  fail(ErrorCode::unsupported,
       "{}: rank0_only is true for a model with units that have groups of their own, expected false, or sharded state "
       "dicts: rank 0 does not have all parameters",
       function);
}

const ProcessGroup& Runtime::group_of(const Unit* unit) const {
  return unit != nullptr && unit->handle() != nullptr ? unit->handle()->group() : group_;
}

bool Runtime::is_compared_in(const ProcessGroup& group, const ProcessGroup& unit_group) const {
  const bool is_own = std::find(own_groups_.begin(), own_groups_.end(), group) != own_groups_.end();
  return unit_group == (is_own ? group : group_);
}

void Runtime::check_call(std::string_view operation, FunctionRef<void(CallArguments&)> check,
                         FunctionRef<void(const Unit& unit, CallArguments&)> describe) const {
  fsdp::check_call(groups_, operation, check, [&](const ProcessGroup& group, CallArguments& arguments) {
    if (!describe) return;
    for (const Unit* unit : units_) {
      if (is_compared_in(group, group_of(unit))) describe(*unit, arguments);
    }
  });
}

void Runtime::agree(std::string_view step, std::exception_ptr failure) const {
  fsdp::agree(groups_, step, std::move(failure));
}

void Runtime::check_idle(std::string_view function) {
  recover();
  if (is_idle()) return;
  fail(ErrorCode::invalid_argument, "{}: called in {} of the model, expected outside of forward and backward", function,
       in_forward_ ? "forward" : "backward");
}

void Runtime::check_summoned(const Unit& unit) const {
  if (unit.is_summoned) return;
  fail(ErrorCode::invalid_argument,
       "forward: {} was called in summon_full_params of other units, expected a call of what is unsharded",
       unit.quoted_name());
}

std::vector<Unit*> Runtime::units_of(const torch::nn::Module& module, bool recurse) const {
  const std::vector<std::shared_ptr<torch::nn::Module>> all = module_->modules();
  if (std::none_of(all.begin(), all.end(), [&](const auto& each) { return each.get() == &module; })) {
    fail(ErrorCode::invalid_argument, "units of a module: the {} is not in the model, expected a module of the model",
         module.name());
  }
  std::set<const Unit*> wanted;
  const auto add = [&](const torch::nn::Module& each) { wanted.insert(unit_of(each)); };
  if (recurse) {
    module.apply([&](const torch::nn::Module& each) { add(each); });
  } else {
    add(module);
  }
  std::vector<Unit*> units;
  std::copy_if(units_.begin(), units_.end(), std::back_inserter(units),
               [&](const Unit* unit) { return wanted.count(unit) != 0; });
  return units;
}

Unit* Runtime::unit_of(const torch::nn::Module& module) const {
  const auto found = unit_of_.find(&module);
  return found == unit_of_.end() ? nullptr : found->second;
}

// --- forward

std::shared_ptr<Call> Runtime::begin_call(Unit& unit, bool may_have_gradient, bool is_implicit) {
  const bool was_in_forward = in_forward_;
  try {
    return try_to_begin_call(unit, may_have_gradient, is_implicit);
  } catch (...) {
    if (&unit == root_ || !in_forward_) report_failure(*root_, std::current_exception());
    if (in_forward_ && !was_in_forward) leave_forward();
    throw;
  }
}

std::shared_ptr<Call> Runtime::try_to_begin_call(Unit& unit, bool may_have_gradient, bool is_implicit) {
  recover();
  const bool is_of_model = &unit == root_ && !is_implicit;
  const bool is_repeated = in_backward_ || (!in_forward_ && CheckpointedRun::is_repeating());
  if (is_repeated) {
    if (!in_backward_) begin_backward(/*node=*/nullptr, in_full_precision_);
    if (is_of_model) begin_repeated_forward();
  } else if (is_of_model) {
    begin_forward();
  } else if (!in_forward_) {
    fail(
        ErrorCode::invalid_argument,
        "forward: {} was called while its parameters are sharded, expected a call of the FullyShardedDataParallel that "
        "contains it, or in summon_full_params",
        unit.quoted_name());
  }
  if (!is_repeated) check_order({&unit, /*is_call=*/true});
  const std::uint64_t begin = CheckpointedRun::advance();
  if (!is_repeated) {
    if (std::find(calls_.begin(), calls_.end(), &unit) == calls_.end()) unit.first_call = begin;
    calls_.push_back(&unit);
  }
  auto call = std::make_shared<Call>(Call{.unit = unit,
                                          .first = std::min(unit.first_call, begin),
                                          .begin = begin,
                                          .first_node = next_node_number(),
                                          .in_full_precision = in_full_precision_,
                                          .is_repeated = is_repeated,
                                          .awaits_backward = is_repeated});
  if (is_repeated) {
    unit.calls.push_back(call);
    complete_after(begin, traversal(/*node=*/nullptr).number);
  }
  if (unit.handle() != nullptr) {
    unit.handle()->set_training_state(TrainingState::forward);
    unshard_for_call(unit);
    unit.use_accumulators(true);  // a change of the parameters' dtype resets them
    if (may_have_gradient) unit.hook_accumulators();
  }
  if (!is_repeated && options_.forward_prefetch) prefetch_forward();
  return call;
}

void Runtime::begin_forward() {
  if (in_forward_)
    fail(ErrorCode::invalid_argument, "forward: the model was called in its own forward, expected one call at a time");
  if (full_precision_in_eval_) {  // ranks that gather elements of other sizes would break the group
    check_call("forward of a sharded model",
               [this](CallArguments& arguments) { arguments.add("training", module_->is_training()); });
  }
  check_parameters();
  const bool has_another_precision = use_full_precision(full_precision_in_eval_ && !module_->is_training());
  for (const auto& unit : owned_) {
    std::erase_if(unit->calls, [](const std::weak_ptr<Call>& call) { return call.expired(); });
  }
  for (Unit* unit : units_) {
    prepare_for_forward(*unit);
    if (has_another_precision) unit->renew_accumulators();
  }
  cast_buffers(/*own_dtype=*/in_full_precision_);
  forward_records_graph_ = c10::GradMode::is_enabled();
  begin_step();
  before_ = std::exchange(calls_, {});
  events_before_ = std::exchange(events_, {});
  expected_ = 0;
  ended_.clear();
  in_forward_ = true;
}

// Begins a call of the model in its backward: one that was checkpointed, or one that a hook of the program makes. It is
// a part of that backward, so what forward prepares, and the order of units for the next one, stay as they are.
void Runtime::begin_repeated_forward() {
  cast_buffers(/*own_dtype=*/in_full_precision_);
  for (Unit* unit : units_) unit->use_accumulators(true);
}

// Throws Error(invalid_argument) if a parameter of a unit was replaced by another tensor.
void Runtime::check_parameters() const {
  const auto now = module_->named_parameters();
  for (const auto& [name, param] : params_) {
    const at::Tensor* const found = now.find(name);
    if (found == nullptr || found->is_same(param)) continue;
    fail(
        ErrorCode::invalid_argument,
        "forward: parameter '{}' was replaced by another tensor, expected the one that was sharded: assign values with "
        "set_data, or in summon_full_params",
        printable(name));
  }
}

void Runtime::prepare_for_forward(Unit& unit) {
  FlatParamHandle& handle = *unit.handle();
  if (!unit.is_kept) handle.free_unsharded();  // the optimizer may have changed the shard
  handle.write_back_params();
  handle.drop_reset_gradients();
  unit.use_accumulators(true);
}

// Selects whether parameters are unsharded in their own dtype. They must be sharded. Returns whether that is another
// choice: the units need other accumulators then.
bool Runtime::use_full_precision(bool on) {
  if (on == in_full_precision_) return false;
  for (Unit* unit : units_) unit->handle()->use_full_precision(on);
  in_full_precision_ = on;
  return true;
}

void Runtime::cast_input(const Unit& unit, at::Tensor& tensor) const {
  const MixedPrecision& mixed =
      unit.handle() != nullptr ? unit.handle()->options().mixed_precision : options_.mixed_precision;
  const bool casts = &unit == root_ ? mixed.cast_root_forward_inputs : mixed.cast_forward_inputs;
  if (&unit == root_ && options_.device && tensor.device() != *options_.device) tensor = tensor.to(*options_.device);
  if (casts && mixed.param_dtype && !in_full_precision_ && tensor.is_floating_point()) {
    tensor = tensor.to(*mixed.param_dtype);
  }
}

void Runtime::end_call(const std::shared_ptr<Call>& call) {
  Unit& unit = call->unit;
  const bool has_gradient = !call->results.empty();
  call->end = CheckpointedRun::advance();
  if (CheckpointedRun::is_first() || (call->is_repeated && has_gradient)) unit.may_be_repeated = true;
  if (call->is_repeated) return end_repeated_call(*call);
  // Without gradients, backward may still repeat the call.
  const bool may_be_reached = has_gradient || !c10::GradMode::is_enabled();
  if (may_be_reached && std::find(ended_.begin(), ended_.end(), &unit) == ended_.end()) ended_.push_back(&unit);
  if (unit.handle() != nullptr) {
    const bool stays = &unit == root_ || !reshards_after_forward(unit.handle()->options().strategy) || is_last_call();
    unit.handle()->reshard(/*frees_unsharded=*/!(has_gradient && stays));
    unit.handle()->set_training_state(TrainingState::idle);
  }
  if (&unit == root_) end_forward(has_gradient);
}

// If the call has results with gradients, its backward follows, so the unit stays unsharded, unless the entire model is
// called again.
void Runtime::end_repeated_call(Call& call) {
  Unit& unit = call.unit;
  const bool is_in_model = &unit != root_ && !root_->running_calls.empty();
  call.awaits_backward = !call.results.empty();
  if (unit.handle() == nullptr || !unit.open_calls.empty() || (call.awaits_backward && !is_in_model)) return;
  if (reshards_after_forward(unit.handle()->options().strategy)) unit.handle()->reshard();
}

void Runtime::end_forward(bool has_gradient) {
  check_order({nullptr, /*is_call=*/true});
  is_order_checked_ = true;
  leave_forward();
  if (!has_gradient) {
    for (Unit* unit : units_) unit->handle()->reshard();  // frees units that were prefetched but not called
  }
  meet();
}

// The streams start after what has been enqueued, such as the optimizer's step and data that was written back.
void Runtime::begin_step() {
  streams_->wait_for_current();
  streams_->is_in_step = true;
}

void Runtime::end_step() {
  streams_->is_in_step = false;
  streams_->hold_at_most(0);
  if (has_offloaded_params_) streams_->finish_copies();
}

void Runtime::leave_forward() {
  end_step();
  in_forward_ = false;
  for (Unit* unit : units_) unit->use_accumulators(false);
}

void Runtime::abandon_call(const std::shared_ptr<Call>& call) {
  if (call->is_repeated) {
    call->awaits_backward = false;
    return;
  }
  if (call->unit.handle() != nullptr) {
    call->unit.handle()->reshard();
    call->unit.handle()->set_training_state(TrainingState::idle);
  }
  if (&call->unit == root_) leave_forward();
}

void Runtime::report_failure(const Unit& unit, const std::exception_ptr& why) noexcept {
  if (in_backward_) return note_failure(why);
  if (&unit != root_) return;  // forward of the model may handle the exception
  for (const ProcessGroup& group : groups_) comm::leave_step(group, "forward of a sharded model", why);
}

void Runtime::check_implicit_call(const Unit& unit) const {
  const MixedPrecision& mixed = unit.handle()->options().mixed_precision;
  if (!mixed.cast_forward_inputs || !mixed.param_dtype || in_full_precision_) return;
  fail(ErrorCode::unsupported,
       "forward: {} is used without a call through its Wrap, and cast_forward_inputs is true, expected that its module "
       "is held and called as a Wrap, so that its inputs can be cast",
       unit.quoted_name());
}

// Returns whether this is the last call of forward, judging by the previous forward. Its backward is the first.
bool Runtime::is_last_call() const { return calls_.size() == before_.size() && calls_ == before_; }

// Compares the next event with those of the other ranks that shard the unit. A collective in the first forward, and
// later if it is not what the previous forward lets expect.
void Runtime::check_order(const Event& next) {
  const ProcessGroup& group = group_of(next.unit);
  if (group.size() == 1) return;
  if (is_order_checked_) {
    check_order_with_before(next);
    events_.push_back(next);
    return;
  }
  if (events_.empty()) {
    group.check_call("the first forward of a sharded model", [&](CallArguments& arguments) {
      arguments.add("gradients enabled", c10::GradMode::is_enabled()).add("training", module_->is_training());
    });
  }
  std::vector<const Unit*> known;  // by all ranks of the group, in this order
  for (const auto& owned : owned_) {
    if (group_of(owned.get()) == group) known.push_back(owned.get());
  }
  const auto found = std::find(known.begin(), known.end(), next.unit);
  const std::int64_t code = 2 * (found - known.begin()) + (next.is_call ? 0 : 1);
  const at::Tensor mine = at::full({1}, code, at::kLong);
  const at::Tensor all = at::empty({group.size()}, at::kLong);
  group.all_gather_into(all, mine);
  const auto name_of = [&](int rank) {
    const auto theirs = static_cast<std::size_t>(all[rank].item<std::int64_t>());
    if (theirs / 2 >= known.size()) return std::string("ended forward");
    return (theirs % 2 == 0 ? "calls " : "unshards ") + known[theirs / 2]->quoted_name();
  };
  for (int rank = 1; rank < group.size(); ++rank) {
    if (all[rank].item<std::int64_t>() == all[0].item<std::int64_t>()) continue;
    fail(ErrorCode::invalid_argument,
         "forward: at call {} of a unit, rank {} {}, rank 0 {}, expected the same units in the same order on all ranks",
         events_.size() + 1, rank, name_of(rank), name_of(0));
  }
  events_.push_back(next);
}

// A rank that departs from the order of the previous forward waits until all ranks do so at the same place, and
// compares their calls then. Other ranks wait for it in their next collective, where they find its note.
void Runtime::check_order_with_before(const Event& next) {
  const auto name_of = [](const Event& event) -> std::string {
    if (event.unit == nullptr) return "the end of forward";
    return event.is_call ? event.unit->quoted_name() : fmt::format("unshard of {}", event.unit->quoted_name());
  };
  const Event expected = expected_ < events_before_.size() ? events_before_[expected_] : Event{nullptr, true};
  if (next == expected) {
    ++expected_;
    return;
  }
  const ProcessGroup& group = group_of(next.unit);
  comm::leave_step(group, "the order of the previous forward",
                   fmt::format("at call {} of a unit it reached {}, expected {} as before", events_.size() + 1,
                               name_of(next), name_of(expected)));
  group.check_call("forward of a sharded model",
                   [&](CallArguments& arguments) { arguments.add("next unit", name_of(next)); });
  const auto from = events_before_.begin() + static_cast<std::ptrdiff_t>(std::min(expected_, events_before_.size()));
  const auto found = std::find(from, events_before_.end(), next);
  if (found != events_before_.end()) expected_ = static_cast<std::size_t>(found - events_before_.begin()) + 1;
}

void Runtime::unshard_for_call(Unit& unit) {
  RECORD_USER_SCOPE("FullyShardedDataParallel.unshard");
  const auto begin = std::chrono::steady_clock::now();
  if (std::exchange(unit.is_kept, false)) check_kept(unit);
  make_room(/*is_prefetched=*/false);
  unit.handle()->unshard();
  waited_ += std::chrono::steady_clock::now() - begin;
}

// Throws Error(invalid_argument) if this rank's shard was changed after it was gathered.
void Runtime::check_kept(Unit& unit) const {
  if (unit.handle()->is_gathered_current()) return;
  for (Unit* each : units_) {  // so that the next forward gathers them
    each->is_kept = false;
    each->handle()->free_unsharded();
  }
  fail(ErrorCode::invalid_argument,
       "forward: parameters of {} were changed while they were gathered, by unshard or since a backward under no_sync, "
       "expected a call of unshard or reshard after the change",
       unit.quoted_name());
}

// On a device, the host may be many calls ahead. So memory that units have freed is returned, after its last use, when
// the next unit needs it: units that are gathered before their calls and memory that is held are at most
// max_prefetched_units, and one more for a unit that is called now.
void Runtime::make_room(bool is_prefetched) {
  if (streams_->held() == 0) return;
  const auto is_ahead = [](const Unit* unit) {
    return unit->handle()->is_gathered() && !unit->handle()->is_unsharded();
  };
  const std::int64_t ahead = std::count_if(units_.begin(), units_.end(), is_ahead);
  const std::int64_t limit = std::max<std::int64_t>(options_.max_prefetched_units, 1) - (is_prefetched ? 1 : 0);
  streams_->hold_at_most(static_cast<std::size_t>(std::max<std::int64_t>(limit - ahead, 0)));
}

void Runtime::prefetch_forward() {
  if (calls_.size() > before_.size() || !std::equal(calls_.begin(), calls_.end(), before_.begin())) return;
  const auto next = before_.begin() + static_cast<std::ptrdiff_t>(calls_.size());
  const auto count = std::min<std::ptrdiff_t>(before_.end() - next, options_.max_prefetched_units);
  std::for_each(next, next + count, [this](Unit* unit) { prefetch(*unit); });
}

void Runtime::prefetch(Unit& unit) {
  if (unit.handle() == nullptr || unit.handle()->is_gathered()) return;
  make_room(/*is_prefetched=*/true);
  unit.handle()->start_unshard();
}

void Runtime::cast_buffers(bool own_dtype) {
  for (const Buffer& buffer : buffers_) {
    const at::ScalarType wanted = own_dtype ? buffer.dtype : buffer.compute_dtype;
    if (buffer.tensor.scalar_type() != wanted) buffer.tensor.set_data(buffer.tensor.detach().to(wanted));
  }
}

}  // namespace tessera::fsdp
