#include "tessera/fsdp/fully_sharded_data_parallel.h"

#include <c10/core/GradMode.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/optimizer.h>

#include <numeric>
#include <set>

#include "fsdp/runtime/runtime.h"
#include "tessera/base/error.h"

namespace tessera::fsdp {

namespace {

const Unit& existing_unit(const Runtime& runtime, const char* function, std::size_t unit) {
  if (unit >= runtime.units().size()) {
    fail(ErrorCode::invalid_argument, "{}: unit {}, expected less than {}, the number of units", function, unit,
         runtime.units().size());
  }
  return *runtime.units()[unit];
}

}  // namespace

bool is_batch_norm(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::BatchNorm1dImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::BatchNorm2dImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::BatchNorm3dImpl*>(&module) != nullptr;
}

HybridGroups hybrid_groups(const ProcessGroup& group, int shard_ranks) {
  group.check_call("hybrid_groups", [&](CallArguments& arguments) {
    if (shard_ranks < 1 || group.size() % shard_ranks != 0) {
      fail(ErrorCode::invalid_argument, "hybrid_groups: shard_ranks is {}, expected a divisor of the group's {} ranks",
           shard_ranks, group.size());
    }
    arguments.add("shard_ranks", shard_ranks);
  });
  std::optional<ProcessGroup> shards, replicas;
  std::vector<int> ranks(static_cast<std::size_t>(shard_ranks));
  for (int first = 0; first < group.size(); first += shard_ranks) {
    std::iota(ranks.begin(), ranks.end(), first);
    if (auto made = group.subgroup(ranks)) shards = std::move(made);
  }
  for (int position = 0; position < shard_ranks; ++position) {
    ranks.clear();
    for (int rank = position; rank < group.size(); rank += shard_ranks) ranks.push_back(rank);
    if (auto made = group.subgroup(ranks)) replicas = std::move(made);
  }
  return {*shards, *replicas};
}

ShardedModule::ShardedModule(std::shared_ptr<torch::nn::Module> module, const ProcessGroup& group, Options options)
    : runtime_(std::make_unique<Runtime>(std::move(module), group, std::move(options))) {}
ShardedModule::~ShardedModule() = default;

Runtime& ShardedModule::runtime() const {
  runtime_->check_not_released();
  return *runtime_;
}
Unit& ShardedModule::root() const { return runtime().root(); }
const std::shared_ptr<torch::nn::Module>& ShardedModule::module_ptr() const { return runtime_->module(); }
const ProcessGroup& ShardedModule::group() const { return runtime_->group(); }
const Options& ShardedModule::options() const { return runtime_->options(); }
void ShardedModule::train(bool on) { runtime_->module()->train(on); }
double ShardedModule::communication_seconds() const { return runtime().communication_seconds(); }

std::size_t ShardedModule::unit_count() const { return runtime().units().size(); }
const FlatParamHandle& ShardedModule::handle(std::size_t unit) const {
  return *existing_unit(runtime(), "handle", unit).handle();
}
const std::string& ShardedModule::unit_name(std::size_t unit) const {
  return existing_unit(runtime(), "unit_name", unit).name();
}

std::vector<at::Tensor> ShardedModule::parameters() const {
  std::vector<at::Tensor> parameters;
  std::set<const void*> seen;  // also those that are replaced by a flat parameter
  if (!options().use_orig_params) {
    for (const Unit* unit : runtime().units()) {
      parameters.push_back(unit->handle()->flat_param());
      for (const at::Tensor& param : unit->handle()->params()) seen.insert(param.unsafeGetTensorImpl());
    }
  }
  for (const at::Tensor& param : runtime().module()->parameters()) {
    if (param.defined() && seen.insert(param.unsafeGetTensorImpl()).second) parameters.push_back(param);
  }
  return parameters;
}

void ShardedModule::zero_grad() {
  for (const at::Tensor& param : parameters()) param.mutable_grad().reset();
}

void ShardedModule::apply(FunctionRef<void(torch::nn::Module& module)> f) {
  summon_full_params([&] {
    if (!f) fail(ErrorCode::invalid_argument, "apply: the function is null, expected a function");
    runtime().module()->apply(f);
  });
}

void ShardedModule::register_comm_hook(CommHook hook) {
  runtime().check_call("register_comm_hook", [&](CallArguments&) {
    runtime().check_idle("register_comm_hook");
    if (!hook) fail(ErrorCode::invalid_argument, "register_comm_hook: the hook is null, expected a function");
    if (runtime().has_comm_hook) {
      fail(ErrorCode::invalid_argument, "register_comm_hook: the model has a hook, expected one registration");
    }
    if (is_hybrid(options().strategy)) {
      fail(ErrorCode::unsupported, "register_comm_hook: the strategy is hybrid, expected another strategy");
    }
  });
  for (const Unit* unit : runtime().units()) unit->handle()->set_comm_hook(hook);
  runtime().has_comm_hook = true;
}

void ShardedModule::register_post_reduce_hook(std::function<void(std::size_t unit)> hook) {
  runtime().check_idle("register_post_reduce_hook");
  runtime().post_reduce_hook = std::move(hook);
}

ShardedModule::NoSync::NoSync(Runtime& runtime, bool off) : runtime_(runtime), before_(runtime.syncs_gradients) {
  runtime_.check_idle("no_sync");
  runtime_.syncs_gradients = runtime_.syncs_gradients && off;
}
ShardedModule::NoSync::~NoSync() { runtime_.syncs_gradients = before_; }

}  // namespace tessera::fsdp
