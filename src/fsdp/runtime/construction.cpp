// Construction: finding the units of a model, comparing them on all ranks, and sharding them.

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

#include "fsdp/environment.h"
#include "fsdp/flat_param/storage.h"
#include "fsdp/groups.h"
#include "fsdp/runtime/find_units.h"
#include "fsdp/runtime/initialize.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/state/sharded_params.h"
#include "fsdp/warn.h"
#include "tessera/base/error.h"

namespace tessera::fsdp {

namespace {

// Of how many bytes of parameters, which units were made from, the memory may be unused before it is returned to the
// system: otherwise the shards of later units would not fit the holes, and the memory of all would be kept.
constexpr std::size_t kReturnedBytes = std::size_t{16} << 20;

std::string text_of(const std::optional<at::ScalarType>& dtype) { return dtype ? c10::toString(*dtype) : "its own"; }

// Each of the following functions adds what must be equal on all ranks.

void describe(ShardingStrategy strategy, const MixedPrecision& mixed, bool offload_params, CallArguments& arguments) {
  arguments.add("strategy", strategy_name(strategy))
      .add("param_dtype", text_of(mixed.param_dtype))
      .add("reduce_dtype", text_of(mixed.reduce_dtype))
      .add("buffer_dtype", text_of(mixed.buffer_dtype))
      .add("keep_low_precision_grads", mixed.keep_low_precision_grads)
      .add("offload_params", offload_params);
}

void describe(const Options& options, CallArguments& arguments) {
  describe(options.strategy, options.mixed_precision, options.offload_params, arguments);
  arguments.add("use_orig_params", options.use_orig_params)
      .add("backward_prefetch", static_cast<int>(options.backward_prefetch))
      .add("forward_prefetch", options.forward_prefetch)
      .add("max_prefetched_units", options.max_prefetched_units)
      .add("sync_module_states", options.sync_module_states)
      .add("extensions", options.extensions != nullptr)
      .add("replicas", options.replicas.has_value());
}

// Adds a unit that is sharded already: its parameters are this rank's shards.
void describe_sharded(const FoundUnit& unit, CallArguments& arguments) {
  const FlatParamHandle& handle = *unit.sharded->handle();
  arguments.add("sharded before", printable(unit.name));
  for (std::size_t i = 0; i < handle.params().size(); ++i) {
    const ParamInfo& param = handle.layout().params()[i];
    arguments.add(
        "parameter",
        fmt::format("'{}' {} {}{}", printable(param.fqn), c10::toString(handle.params()[i].scalar_type()),
                    shape_to_string(param.shape), handle.params()[i].requires_grad() ? " that requires grad" : ""));
  }
}

void describe(const FoundUnit& unit, const Options& options, CallArguments& arguments) {
  arguments.add("unit",
                fmt::format("'{}' on {}", printable(unit.name), c10::DeviceTypeName(device_of(unit, options).type())));
  describe(unit.strategy, unit.mixed_precision, unit.offload_params, arguments);
  if (unit.sharded != nullptr) return describe_sharded(unit, arguments);
  const auto add = [&](const char* kind, const std::string& name, const at::Tensor& tensor) {
    arguments.add(
        kind, fmt::format("'{}' {} {}{}", printable(name), c10::toString(tensor.scalar_type()),
                          shape_to_string(tensor.sizes().vec()), tensor.requires_grad() ? " that requires grad" : ""));
  };
  for (const NamedParameter& param : unit.params) add("parameter", param.fqn, param.parameter);
  if (!options.sync_module_states) return;
  for (const torch::nn::Module* module : unit.modules) {
    for (const auto& buffer : module->named_buffers(/*recurse=*/false)) {
      if (buffer.value().defined()) add("buffer", buffer.key(), buffer.value());
    }
  }
}

// Warns of what a user may not expect of these options.
void warn_about(const torch::nn::Module& model, const std::vector<FoundUnit>& units, const ProcessGroup& group,
                const Options& options) {
  const auto is_model = [&](const auto& module) { return module.get() == &model; };
  if (std::any_of(options.ignored_modules.begin(), options.ignored_modules.end(), is_model)) {
    warn_once("shard a model: ignored_modules contains the model itself, so nothing is sharded");
  }
  if (group.size() == 1 && options.strategy != ShardingStrategy::no_shard && !is_hybrid(options.strategy) &&
      !options.extensions) {
    warn_once(fmt::format("shard a model: the group has one rank, so the strategy is no_shard in place of {}",
                          strategy_name(options.strategy)));
  }
  const auto warn_of_units = [&](const auto& is_meant, std::string_view what) {
    const auto count = std::count_if(units.begin(), units.end(), is_meant);
    if (count == 0) return;
    const auto first = std::find_if(units.begin(), units.end(), is_meant);
    warn_once(fmt::format("shard a model: {} of {} units, such as '{}', {}", count, units.size(),
                          printable(first->name), what));
  };
  const auto keeps_precision = [&](const FoundUnit& unit) {
    return unit.module != &model && keeps_full_precision(*unit.module, options);
  };
  warn_of_units(keeps_precision,
                "are single modules that keep their dtypes under mixed precision "
                "(Options::keeps_full_precision)");
  const auto is_partly_frozen = [](const FoundUnit& unit) {
    const auto is_frozen = [](const NamedParameter& param) { return !param.parameter.requires_grad(); };
    const auto frozen = std::count_if(unit.params.begin(), unit.params.end(), is_frozen);
    return frozen != 0 && frozen != std::ssize(unit.params);
  };
  if (!options.use_orig_params) return;  // an error there
  warn_of_units(is_partly_frozen,
                "have frozen parameters among others: these take the memory of a gradient and are "
                "reduced, too; separate units avoid that");
}

// The models of this process that are sharded, by their modules.
class ShardedModels {
 public:
  static ShardedModels& all() {
    static auto& models = *new ShardedModels;  // models may be destroyed after static objects
    return models;
  }
  void add(Runtime& runtime) {
    const std::lock_guard lock(mutex_);
    models_.insert_or_assign(runtime.module().get(), &runtime);
  }
  void remove(const Runtime& runtime) {
    const std::lock_guard lock(mutex_);
    if (const auto found = models_.find(runtime.module().get()); found != models_.end() && found->second == &runtime) {
      models_.erase(found);
    }
  }
  Runtime* find(const torch::nn::Module& module) {
    const std::lock_guard lock(mutex_);
    const auto found = models_.find(&module);
    return found == models_.end() ? nullptr : found->second;
  }

 private:
  std::mutex mutex_;
  std::map<const torch::nn::Module*, Runtime*> models_;
};

}  // namespace

Runtime::Runtime(std::shared_ptr<torch::nn::Module> module, const ProcessGroup& group, Options options)
    : module_(std::move(module)),
      group_(group),
      options_(std::move(options)),
      full_precision_in_eval_(is_set("FSDP_USE_FULL_PREC_IN_EVAL")) {
  const std::vector<ProcessGroup> of_mesh = mesh_groups(module_.get());
  std::vector<FoundUnit> found;
  std::exception_ptr failure;
  groups_.push_back(group_);
  if (options_.replicas) groups_.push_back(*options_.replicas);
  try {
    find_and_compare(found);
  } catch (...) {
    failure = std::current_exception();
  }
  fsdp::agree(of_mesh, "shard a model", failure);
  groups_.insert(groups_.end(), of_mesh.begin(), of_mesh.end());
  const auto with_params =
      std::find_if(found.begin(), found.end(), [](const auto& unit) { return !unit.params.empty(); });
  streams_ = std::make_shared<Streams>(with_params == found.end() ? at::kCPU : device_of(*with_params, options_));
  streams_->meets_after_backward = true;
  std::size_t freed_bytes = 0;
  for (const FoundUnit& unit : found) {
    owned_.emplace_back();
    if (unit.sharded != nullptr) continue;
    for (const NamedParameter& param : unit.params) freed_bytes += param.parameter.nbytes();
    owned_.back() = make_unit(unit, failure);
    if (freed_bytes < kReturnedBytes && &unit != &found.back()) continue;
    return_free_memory();  // memory of the full parameters
    freed_bytes = 0;
  }
  if (has_own_groups_) agree("shard a model", failure);
  take_units(found);
  has_offloaded_params_ = std::any_of(owned_.begin(), owned_.end(), [](const auto& unit) {
    return unit->handle() != nullptr && unit->handle()->options().offload_params;
  });
  if (group_.rank() == 0) warn_about(*module_, found, group_, options_);
  root_ = owned_.front().get();
  for (const auto& unit : owned_) {
    if (unit->handle() != nullptr) units_.push_back(unit.get());
  }
  for (const Unit* unit : units_) {
    const FlatParamLayout& layout = unit->handle()->layout();
    const auto add = [&](const std::string& fqn, std::size_t i) { params_.emplace(fqn, unit->handle()->params()[i]); };
    for (std::size_t i = 0; i < layout.params().size(); ++i) add(layout.params()[i].fqn, i);
    for (const SharedParamInfo& shared : layout.shared_params()) add(shared.fqn, shared.primary);
  }
  implicit_calls_ = std::make_shared<ImplicitCalls>(*this);
  for (const FoundUnit& unit : found) {
    const std::optional<at::ScalarType> dtype = unit.mixed_precision.buffer_dtype;
    for (const torch::nn::Module* owner : unit.modules) {
      unit_of_[owner] = owned_[static_cast<std::size_t>(&unit - found.data())].get();
      if (!dtype || (owner != unit.module && keeps_full_precision(*owner, options_))) continue;
      for (const at::Tensor& buffer : owner->buffers(/*recurse=*/false)) {
        if (buffer.defined() && buffer.is_floating_point()) buffers_.push_back({buffer, buffer.scalar_type(), *dtype});
      }
    }
  }
  ShardedModels::all().add(*this);
}

Runtime::~Runtime() {
  *alive_ = false;
  if (!is_released_) ShardedModels::all().remove(*this);
}

Runtime* Runtime::of(const torch::nn::Module& module) { return ShardedModels::all().find(module); }

void Runtime::check_not_released() const {
  if (!is_released_) return;
  fail(ErrorCode::invalid_argument,
       "the model is a part of another one that was sharded since, expected calls of that FullyShardedDataParallel");
}

// Takes over the units of models inside this one that are sharded already.
void Runtime::take_units(const std::vector<FoundUnit>& found) {
  for (std::size_t i = 0; i < found.size(); ++i) {
    Unit* const unit = found[i].sharded;
    if (unit == nullptr) continue;
    Runtime& from = unit->runtime();
    has_comm_hook = has_comm_hook || from.has_comm_hook;
    owned_[i] = from.release(*unit);
    unit->move_to(*this, found[i].name, found[i].prefix);
  }
}

// Gives a unit away. From the first one on, the model cannot be used by itself.
std::unique_ptr<Unit> Runtime::release(Unit& unit) {
  if (!std::exchange(is_released_, true)) {
    ShardedModels::all().remove(*this);
    cast_buffers(/*own_dtype=*/true);
    *alive_ = false;
    units_.clear();
    root_ = nullptr;
  }
  const auto found =
      std::find_if(owned_.begin(), owned_.end(), [&](const auto& owned) { return owned.get() == &unit; });
  std::unique_ptr<Unit> released = std::move(*found);
  owned_.erase(found);
  return released;
}

// Finds the units, and compares them on all ranks. A collective of the group, of the replicas, and of the units'
// groups, which it adds to groups_.
void Runtime::find_and_compare(std::vector<FoundUnit>& found) {
  fsdp::check_call(groups_, "shard a model", [&](CallArguments& arguments) {
    if (!module_) fail(ErrorCode::invalid_argument, "the module is null, expected a module");
    if (options_.max_prefetched_units < 0) {
      fail(ErrorCode::invalid_argument, "max_prefetched_units is {}, expected 0 or more",
           options_.max_prefetched_units);
    }
    found = find_units(*module_, group_, options_);
    check_one_device(found, options_);
    const auto is_replicated = [](const FoundUnit& unit) {
      return unit.sharded == nullptr && !is_sharded(unit.strategy);
    };
    if (options_.extensions && std::any_of(found.begin(), found.end(), is_replicated)) {
      fail(ErrorCode::unsupported, "extensions are given and a unit has strategy no_shard, expected another strategy");
    }
    const bool is_parallel = !mesh_groups(module_.get()).empty();
    if (is_parallel && !own_groups(found, group_).empty()) {
      fail(ErrorCode::unsupported, "a unit of a tensor parallel model has a group, expected the model's group only");
    }
    describe(options_, arguments);
    arguments.add("FSDP_USE_FULL_PREC_IN_EVAL", full_precision_in_eval_);
  });
  OwnGroupParams own = check_own_groups(found, group_);
  of_other_ranks_ = std::move(own.names);
  has_own_groups_ = !of_other_ranks_.empty();
  has_all_params_ = own.are_on_all_ranks;
  for (const FoundUnit& unit : found) {
    for (const NamedParameter& param : unit.params) of_other_ranks_.erase(param.fqn);
  }
  check_same_parts(*module_, group_);
  if (options_.replicas) check_same_parts(*module_, *options_.replicas);
  own_groups_ = own_groups(found, group_);
  groups_.insert(groups_.begin(), own_groups_.begin(),
                 own_groups_.end());  // the model's group lets all ranks know what these found
  fsdp::check_call(
      groups_, "shard a model", [](CallArguments&) {},
      [&](const ProcessGroup& group, CallArguments& arguments) {
        for (const FoundUnit& unit : found) {
          if (is_compared_in(group, unit.group)) describe(unit, options_, arguments);
        }
      });
}

// A failure of a unit with a group of its own is kept in `failure`, and thrown at the next unit of the model's group:
// other ranks learn of it there. Returns a unit without a handle then.
std::unique_ptr<Unit> Runtime::make_unit(const FoundUnit& found, std::exception_ptr& failure) {
  const bool is_own = found.group != group_;
  std::unique_ptr<FlatParamHandle> handle;
  try {
    initialize(found, is_own ? std::span(&found.group, 1) : std::span(groups_), options_, failure);
    if (!found.params.empty()) {
      FlatParamOptions flat;
      // One rank has nothing to gather: its shard is the parameter itself.
      const bool is_alone = found.group.size() == 1 && !is_hybrid(found.strategy) && !options_.extensions;
      flat.strategy = is_alone ? ShardingStrategy::no_shard : found.strategy;
      flat.mixed_precision = found.mixed_precision;
      flat.use_orig_params = options_.use_orig_params;
      flat.device = device_of(found, options_);
      flat.offload_params = found.offload_params;
      if (is_hybrid(found.strategy)) flat.replicas = options_.replicas;
      flat.extensions = options_.extensions;
      handle = std::make_unique<FlatParamHandle>(found.params, found.group, flat);
    }
  } catch (...) {
    if (!is_own) throw;
    failure = std::current_exception();
  }
  return std::make_unique<Unit>(*this, found.name, std::move(handle), *found.module);
}

}  // namespace tessera::fsdp
