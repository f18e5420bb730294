// Full parameters and gradients outside of forward and backward.

#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>

#include "fsdp/groups.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/warn.h"
#include "tessera/base/error.h"

namespace tessera::fsdp {

namespace {

// Hides the gradients of some parameters during its lifetime: they have the shapes of the sharded parameters.
class HiddenGradients {
 public:
  explicit HiddenGradients(const std::vector<at::Tensor>& params) : params_(params) {
    for (const at::Tensor& param : params_) {
      grads_.push_back(param.grad());
      param.mutable_grad().reset();
    }
  }
  ~HiddenGradients() {
    for (std::size_t i = 0; i < params_.size(); ++i) params_[i].mutable_grad() = grads_[i];
  }
  HiddenGradients(const HiddenGradients&) = delete;
  HiddenGradients& operator=(const HiddenGradients&) = delete;

 private:
  const std::vector<at::Tensor>& params_;
  std::vector<at::Tensor> grads_;
};

// Unshards a unit with summon(). The destructor shards it again.
class Summoned {
 public:
  explicit Summoned(FlatParamHandle& handle) : handle_(handle), gradients_(handle.params()) {}
  void summon(const SummonOptions& options) {
    handle_.set_training_state(TrainingState::summon_full_params);
    handle_.write_back_params();
    handle_.summon();
    if (options.with_grads) handle_.unshard_grad();
    if (options.rank0_only && handle_.group().rank() != 0) handle_.reshard();
    if (!options.offload_to_cpu) return;
    handle_.to_cpu();
    for (const at::Tensor& param : handle_.params()) {
      if (param.grad().defined()) param.mutable_grad() = param.grad().cpu();
    }
  }
  ~Summoned() {
    handle_.end_summon();
    handle_.set_training_state(TrainingState::idle);
  }
  Summoned(const Summoned&) = delete;
  Summoned& operator=(const Summoned&) = delete;

 private:
  FlatParamHandle& handle_;
  HiddenGradients gradients_;
};

// Frees what a unit has gathered for forward and backward, unless the shards of all ranks are as they were when it was
// gathered. A collective if it has.
void free_if_changed(FlatParamHandle& handle) {
  if (!handle.is_gathered()) return;
  const at::Tensor changed = at::full({1}, handle.is_gathered_current() ? 0 : 1, at::kInt);
  handle.group().all_reduce(changed, ReduceOp::max);
  if (changed.item<int>() != 0) handle.free_unsharded();
}

// Marks units as unsharded during its lifetime.
class SummonedUnits {
 public:
  SummonedUnits(Runtime& runtime, const std::vector<Unit*>& units) : runtime_(runtime), units_(units) { mark(true); }
  ~SummonedUnits() { mark(false); }
  SummonedUnits(const SummonedUnits&) = delete;
  SummonedUnits& operator=(const SummonedUnits&) = delete;

 private:
  void mark(bool on) {
    runtime_.is_summoned = on;
    for (Unit* unit : units_) unit->is_summoned = on;
    runtime_.root().is_summoned = on && units_.size() == runtime_.units().size();
  }
  Runtime& runtime_;
  const std::vector<Unit*>& units_;
};

}  // namespace

void ShardedModule::summon_full_params(FunctionRef<void()> f, const SummonOptions& options) {
  std::vector<Unit*> units;
  runtime().check_call(
      "summon_full_params",
      [&](CallArguments& arguments) {
        runtime().check_idle("summon_full_params");
        if (runtime().is_summoned) {
          fail(ErrorCode::invalid_argument, "summon_full_params: called in itself, expected one call at a time");
        }
        if (!f) fail(ErrorCode::invalid_argument, "summon_full_params: the function is null, expected a function");
        if (options.rank0_only && options.writeback) {
          fail(ErrorCode::invalid_argument,
               "summon_full_params: rank0_only and writeback are both set, expected at most one: changes of rank 0 do "
               "not "
               "reach the other ranks");
        }
        units = runtime().units_of(options.module != nullptr ? *options.module : *module_ptr(), options.recurse);
        for (const Unit* unit : units) {
          unit->handle()->write_back_params();
          if (options.with_grads) unit->handle()->adopt_visible_gradients();
        }
        arguments.add("writeback", options.writeback)
            .add("rank0_only", options.rank0_only)
            .add("with_grads", options.with_grads);
      },
      [&](const Unit& unit, CallArguments& arguments) {
        if (std::find(units.begin(), units.end(), &unit) == units.end()) return;
        arguments.add("unit", unit.name()).add("is gathered", unit.handle()->is_gathered());
      });
  if (options.offload_to_cpu && !options.rank0_only && group().rank() == 0 && group().size() > 1) {
    warn_once(
        "summon_full_params: offload_to_cpu without rank0_only: each rank of a host has all parameters in its memory");
  }
  runtime().cast_buffers(/*own_dtype=*/true);
  std::vector<std::unique_ptr<Summoned>> summoned;
  for (Unit* unit : units) {
    summoned.push_back(std::make_unique<Summoned>(*unit->handle()));
    summoned.back()->summon(options);
  }
  agree_on(runtime().groups(), "summon_full_params", [&] {
    const c10::AutoGradMode no_gradient(false);
    const SummonedUnits marked(runtime(), units);
    f();
    if (!options.writeback) return;
    for (const Unit* unit : units) unit->handle()->check_unsharded(options.with_grads);
  });
  if (options.writeback) {
    for (const Unit* unit : units) {
      unit->handle()->write_back_unsharded();
      if (options.with_grads) unit->handle()->write_back_unsharded_grad();
    }
  }
  summoned.clear();
  for (const Unit* unit : units) free_if_changed(*unit->handle());
  if (!options.writeback || !options.with_grads) return;
  for (const Unit* unit : units) unit->handle()->reshard_grad();
}

}  // namespace tessera::fsdp
