#pragma once
/// \file
/// A model whose parameters, gradients and optimizer state are sharded over ranks that train it together.
///
///     Gpt gpt(config);                                           // holds its blocks in fsdp::Wrap
///     fsdp::FullyShardedDataParallel<Gpt> model(gpt, group);     // sharded now
///     torch::optim::AdamW optimizer(model.parameters(), 3e-4);   // of what this rank has
///     at::Tensor loss = loss_of(model(tokens), targets);         // of this rank's part of the batch
///     loss.backward();                                           // gradients are averaged over the ranks
///     optimizer.step();
///     save({{"model", model.state_dict()}, {"optim", model.optim_state_dict(optimizer)}}, "step-1", group);
///
/// Laws: a step does what one process would that sees all ranks' batches and averages their losses, up to rounding. Of
/// parameters, gradients and optimizer state a rank holds its part, and while it computes, those of the units that
/// compute or are put together next, and of the model's own parameters. Outside of forward, backward and
/// summon_full_params, a parameter is the one-dimensional piece that this rank has of it, possibly empty.
///
/// Every rank calls the same units in the same order. Functions that communicate say "a collective"; so are forward
/// and backward. In the first forward ranks compare the order of units, and `Error(invalid_argument)` names the first
/// two that differ. If a rank dies, every collective throws `Error(rank_failure)` naming it, out of forward or
/// backward; after that the model can't be used.
///
/// A model that is tensor parallel (tessera/tensor/tensor_parallel.h) is sharded by ranks that have the same part of
/// it: `group` is that of the mesh's other dimension, `mesh.group("dp")`. State dicts hold the parameters of all ranks
/// of the mesh, and are saved and loaded by its whole group, `mesh.group()`; to put them together is a collective of
/// both dimensions, and so is clip_grad_norm_. PyTorch: torch/distributed/fsdp/fully_sharded_data_parallel.py.

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/comm/process_group.h"
#include "tessera/fsdp/flat_param_handle.h"
#include "tessera/fsdp/options.h"
#include "tessera/fsdp/wrap.h"
#include "tessera/fsdp/wrap_policy.h"
#include "tessera/state/value.h"

namespace torch::optim {
class Optimizer;
}

namespace tessera::fsdp {

enum class BackwardPrefetch : std::uint8_t {
  none,
  pre,   ///< the next unit is gathered while this one's gradients are computed: fastest
  post,  ///< only then: one unit less in memory
};

struct Options {
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  MixedPrecision mixed_precision;
  /// Whether parameters keep to be what an optimizer works on, each by itself. If not, it works on one flat parameter
  /// for each unit.
  bool use_orig_params = true;
  /// Every wrapped module unless given.
  WrapPolicy policy = nullptr;
  /// Modules, with all in them, and parameters that are left alone: not sharded, their gradients not averaged.
  std::vector<std::shared_ptr<torch::nn::Module>> ignored_modules;
  std::vector<at::Tensor> ignored_parameters;
  BackwardPrefetch backward_prefetch = BackwardPrefetch::pre;
  /// Whether the next unit is gathered while this one computes in forward; "next" is as in the forward before.
  bool forward_prefetch = true;
  /// How many units may be gathered before they are needed, if they are prefetched.
  int max_prefetched_units = 1;
  /// Whether parameters and buffers begin as rank 0's.
  bool sync_module_states = false;
  /// Where parameters compute; the parameters' own device unless given, and CPU where that is meta.
  std::optional<at::Device> device = std::nullopt;
  /// Shards and their gradients are on CPU but while they compute.
  bool offload_params = false;
  /// Initialises the parameters and buffers that a module itself has, not those of its children, after they were
  /// materialised from meta. Called unit by unit, so that no more than one unit is whole at a time.
  std::function<void(torch::nn::Module& module)> param_init_fn = nullptr;
  /// With a hybrid strategy, and only then: the ranks that have the same shard; see hybrid_groups.
  std::optional<ProcessGroup> replicas = std::nullopt;
};

/// The groups of a rank for hybrid sharding: consecutive ranks share one model, and those at the same place in each of
/// these groups have the same shard.
struct HybridGroups {
  ProcessGroup shards, replicas;
};
/// A collective. Throws `Error(invalid_argument)` unless `shard_ranks` divides the size of `group`.
HybridGroups hybrid_groups(const ProcessGroup& group, int shard_ranks);

/// What a state dict holds of a parameter.
enum class StateDictType : std::uint8_t {
  sharded,  ///< this rank's boxes of it, no copy: saved and loaded on any number of ranks, under any strategy
  full,     ///< all of it, a copy
  local,    ///< this rank's flat parameter, no copy: for the same ranks and units only; of no tensor parallel model
};

struct FullStateOptions {
  bool rank0_only = true;  ///< on other ranks of the group an empty dict
  bool offload_to_cpu = true;
};

struct SummonOptions {
  bool writeback = true;    ///< what `f` changes is kept; on each rank what it has a shard of
  bool rank0_only = false;  ///< other ranks see shards; without writeback only
  bool offload_to_cpu = false;
  bool with_grads = false;  ///< the gradients are whole, too; what `f` does to them is not kept
};

class Runtime;

/// FullyShardedDataParallel but for the class of its model.
class ShardedModule {
 public:
  ShardedModule(const ShardedModule&) = delete;
  ShardedModule& operator=(const ShardedModule&) = delete;

  const std::shared_ptr<torch::nn::Module>& module_ptr() const;
  const ProcessGroup& group() const;
  const Options& options() const;
  void train(bool on = true);
  void eval() { train(false); }

  /// What an optimizer works on, made after the model was sharded: the parameters in the module's order, or without
  /// `use_orig_params` the units' flat parameters and behind them those that are ignored.
  std::vector<at::Tensor> parameters() const;
  /// Throws `Error(invalid_argument)` saying what to do where an optimizer works on anything else: one that was made
  /// before the model was sharded, and holds what is no parameter any more or state of whole parameters.
  void check_optimizer(const torch::optim::Optimizer& optimizer) const;
  void zero_grad();
  /// How long this rank has waited for others in forward and backward, of all calls so far.
  double communication_seconds() const;

  /// The units in the order in which they were found: the model's own parameters first, if it has any in no other.
  std::size_t unit_count() const;
  const FlatParamHandle& handle(std::size_t unit) const;
  /// The name of the unit's module in the model; "" for the model itself.
  const std::string& unit_name(std::size_t unit) const;

  /// While it lives, backward adds gradients up and communicates none; the backward after it reduces them all. With
  /// `off` it does nothing: `auto guard = model.no_sync(is_last_of_the_batch)`.
  class NoSync {
   public:
    NoSync(Runtime& runtime, bool off);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    Runtime& runtime_;
    bool before_;
  };
  [[nodiscard]] NoSync no_sync(bool off = false) { return {*runtime_, off}; }

  /// Scales all gradients so that their norm, of all ranks' shards together, is at most `max_norm`, and returns what it
  /// was. `norm_type` is 1, 2, ... or infinity. A collective. Throws `Error(invalid_argument)` if a gradient hasn't
  /// been reduced.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0);

  /// Runs `f` while all parameters are whole, of their own dtype, and the model and its units can be called as if
  /// nothing were sharded, without gradients for it. A collective. Throws `Error(invalid_argument)` in forward or
  /// backward. If `f` throws on any rank, nothing is written back, and all ranks throw.
  void summon_full_params(const std::function<void()>& f, const SummonOptions& options = {});

  /// Parameters and buffers by the names of the module that was wrapped. A collective if `full`.
  StateDict state_dict(StateDictType type = StateDictType::sharded, const FullStateOptions& full = {});
  /// Takes what state_dict gave, of any type, on any ranks. Of a full one, other ranks than 0 may bring an empty dict
  /// if it is `rank0_only`. Law: all is set or nothing. A collective. Throws `Error(invalid_argument)` naming all that
  /// is missing, unexpected or of another shape.
  void load_state_dict(const StateDict& state_dict, const FullStateOptions& full = {.rank0_only = false});

  /// The optimizer's state by parameter, as `get_optimizer_state_dict` has it of a model that isn't sharded. Not
  /// `local`: `Error(unsupported)`. Throws as check_optimizer. A collective if `full`.
  StateDict optim_state_dict(const torch::optim::Optimizer& optimizer, StateDictType type = StateDictType::sharded,
                             const FullStateOptions& full = {});
  /// Takes what optim_state_dict gave, on any ranks and in either mode of `use_orig_params`. A collective. Throws as
  /// set_optimizer_state_dict and check_optimizer.
  void load_optim_state_dict(torch::optim::Optimizer& optimizer, const StateDict& state_dict,
                             const FullStateOptions& full = {.rank0_only = false});

 protected:
  ShardedModule(std::shared_ptr<torch::nn::Module> module, const ProcessGroup& group, Options options);
  ~ShardedModule();
  Unit& root() const;

 private:
  std::unique_ptr<Runtime> runtime_;
};

/// `Module` is a holder, such as `Gpt` of `TORCH_MODULE(Gpt)`, or a class of modules, given as shared_ptr.
template <typename Module>
class FullyShardedDataParallel : public ShardedModule {
  static constexpr bool kIsHolder = requires { typename Module::ContainedType; };

 public:
  using Pointer = std::conditional_t<kIsHolder, Module, std::shared_ptr<Module>>;

  /// A collective. Shards the model: the ranks of `group` hold it together. Throws on all ranks
  /// `Error(invalid_argument)` for what FlatParamHandle refuses, a parameter that is in two units, a module that is
  /// sharded already, parameters on meta that no `param_init_fn` initialises, and ranks that have different parts of a
  /// tensor parallel model.
  explicit FullyShardedDataParallel(Pointer module, const ProcessGroup& group = {}, Options options = {})
      : ShardedModule(pointer_of(module), group, std::move(options)), module_(std::move(module)) {}

  /// The model itself, whose forward is not to be called: this one's is.
  const Pointer& module() const { return module_; }
  auto* operator->() { return module_.operator->(); }
  auto* operator->() const { return module_.operator->(); }

  /// The model's forward. A collective.
  template <typename... Args>
  auto forward(Args&&... arguments) {
    if constexpr (std::is_base_of_v<Wrappable, std::remove_reference_t<decltype(*module_)>>) {
      return module_->forward(std::forward<Args>(arguments)...);  // which is the root's call
    } else {
      const auto call = [this](auto&&... args) { return module_->forward(std::forward<decltype(args)>(args)...); };
      using Result = std::invoke_result_t<decltype(call), Args...>;
      return detail::call_unit<Result, detail::ByValue<Args>...>(root(), call, std::forward<Args>(arguments)...);
    }
  }
  template <typename... Args>
  auto operator()(Args&&... arguments) {
    return forward(std::forward<Args>(arguments)...);
  }

 private:
  static std::shared_ptr<torch::nn::Module> pointer_of(const Pointer& module) {
    if constexpr (kIsHolder) {
      return module.ptr();
    } else {
      return module;
    }
  }

  Pointer module_;
};

}  // namespace tessera::fsdp
