#pragma once
/// \file
/// A model whose parameters, gradients and optimizer state are sharded over ranks that train it together.
///
///     Gpt gpt(config);                                           // holds its blocks in fsdp::Wrap
///     fsdp::FullyShardedDataParallel<Gpt> model(gpt, group);     // sharded now
///     torch::optim::AdamW optimizer(model.parameters(), 3e-4);   // of this rank's shards
///     at::Tensor loss = loss_of(model(tokens), targets);         // of this rank's share of the batch
///     loss.backward();                                           // gradients are averaged over the ranks
///     optimizer.step();
///     save({{"model", model.state_dict()}, {"optim", model.optim_state_dict(optimizer)}}, "step-1", group);
///
/// Law: up to rounding, a training step has the result of one process that sees the batches of all ranks and averages
/// their losses. Outside of forward, backward and summon_full_params, a parameter is the one-dimensional piece of it
/// that this rank has, possibly empty.
///
/// Memory of a rank at its peak in a step, with P bytes of parameters, of which the largest unit has U, G of gradients,
/// O of optimizer state, A of activations, N ranks that shard the model, and k = max_prefetched_units:
///
///     full_shard, hybrid_shard             (P + G + O) / N + (k + 6) U + A
///     shard_grad_op, hybrid_shard_zero2    (P + O) / N + P + (k + 6) U + A
///     no_shard                             P + G + O + 2 U + A
///
/// While it is constructed from a model on meta (tessera/fsdp/meta_init.h): P / N + 2 U + 16 MiB. docs/memory.md has
/// the conditions, and what was measured.
///
/// All ranks that shard a unit call it, in the same order as their other units. The comments of functions that
/// communicate state "A collective"; forward and backward are collectives, too. In the first forward the ranks compare
/// the order of their calls; if it differs, every rank throws `Error(invalid_argument)` naming the first two units that
/// differ. Later, ranks whose order departs from that of the previous forward compare it; if not all ranks do so at the
/// same call, every rank throws. If a rank dies, every collective, forward and backward included, throws
/// `Error(rank_failure)` naming it. The model cannot be used after that.
///
/// Collectives compare the ranks' calls: if the arguments of a rank are invalid, or differ where they must be equal,
/// every rank throws, and the model stays usable. forward and backward do not compare. If one of them throws on a rank,
/// the others throw an error naming it, as if it had died; if all ranks throw at the same place, the model stays
/// usable. The gradients of units that a backward has reached before it throws are freed. An exception between forward
/// and backward, for example in the loss, is not noticed before the rank exits or calls the model again.
///
/// Keep the model's tensors while it is sharded: assign values with `copy_` or `set_data`, or in summon_full_params. In
/// a forward after a registered parameter was replaced by another tensor, every rank that did so throws
/// `Error(invalid_argument)`. A member such as `linear->weight` that is assigned another tensor is not noticed.
///
/// Warnings are LibTorch's (`TORCH_WARN`), each text once in a process: where options have no effect or cost more than
/// they seem to, and where environment variables disable a part. TORCH_DISTRIBUTED_DEBUG=INFO adds those about padding,
/// about data that was assigned to parameters, and about gradients that only some ranks have.
///
/// Profilers (`at::RecordFunction`, user scope) see the ranges FullyShardedDataParallel.forward with the unit's name,
/// .unshard, .pre_backward, .post_backward and .reduce.
///
/// A tensor parallel model (tessera/tensor/tensor_parallel.h) is sharded over ranks that have the same part of it:
/// `group` is the group of the mesh's other dimension, `mesh.group("dp")`. Its state dicts cover the parameters of all
/// ranks of the mesh; save and load them with the group of the full mesh, `mesh.group()`. Gathering full state dicts
/// and clip_grad_norm_ are collectives of both dimensions. PyTorch:
/// torch/distributed/fsdp/fully_sharded_data_parallel.py.

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
#include "tessera/fsdp/unshard_handle.h"
#include "tessera/fsdp/wrap.h"
#include "tessera/fsdp/wrap_policy.h"
#include "tessera/state/module_state.h"
#include "tessera/state/value.h"
#include "tessera/tensor/device_mesh.h"

namespace torch::optim {
class Optimizer;
}

namespace tessera::fsdp {

/// Returns whether a module is a batch norm.
bool is_batch_norm(const torch::nn::Module& module);

/// When backward starts to gather the next unit.
enum class BackwardPrefetch : std::uint8_t {
  none,  ///< when it needs the unit
  pre,   ///< while the gradients of this unit are computed: fastest
  post,  ///< after that: one unit less in memory
};

struct Options {
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  MixedPrecision mixed_precision;
  /// Selects modules whose own parameters and buffers keep their dtypes under mixed precision. They become units, with
  /// the precision that the policy states for them, if any. PyTorch: MixedPrecision._module_classes_to_ignore.
  ModulePredicate keeps_full_precision = is_batch_norm;
  /// Whether the optimizer works on the original parameters. If false, it works on one flat parameter per unit. False
  /// in PyTorch; here the original parameters cost nothing, and parameters may be frozen and have options of their own.
  bool use_orig_params = true;
  /// Selects the units and their options; by default every wrapped module is one. With a policy, any module can be. The
  /// model itself has the options stated here.
  WrapPolicy policy = nullptr;
  /// Modules, including their submodules, and parameters that are not sharded and whose gradients are not averaged. A
  /// parameter of an ignored module is ignored in other modules that share it, too.
  std::vector<std::shared_ptr<torch::nn::Module>> ignored_modules;
  std::vector<at::Tensor> ignored_parameters;
  BackwardPrefetch backward_prefetch = BackwardPrefetch::pre;
  /// Whether forward gathers the next unit while this one computes. Expects the order of the previous forward. False in
  /// PyTorch, whose GPU streams run ahead; on the CPU nothing else would overlap.
  bool forward_prefetch = true;
  /// The maximum number of units that are gathered before they are needed, except by `unshard`. PyTorch:
  /// limit_all_gathers, which is 2 or no limit.
  int max_prefetched_units = 1;
  /// Whether to broadcast the parameters and buffers of rank 0 before sharding, on any device.
  bool sync_module_states = false;
  /// The device of computation. By default the parameters' own, or CPU if they are on meta.
  std::optional<at::Device> device = std::nullopt;
  /// Keeps shards and their gradients on CPU except during computation.
  bool offload_params = false;
  /// Initializes a module's own parameters and buffers, not those of its children, after they were materialized from
  /// meta. Called unit by unit, so that at most one unit is unsharded at a time. By default layers of LibTorch get the
  /// values of their constructors, and other modules are refused: see reset_parameters.h.
  std::function<void(torch::nn::Module& module)> param_init_fn = nullptr;
  /// The ranks that have the same shard; see hybrid_groups. Required by the hybrid strategies; an error with any other.
  std::optional<ProcessGroup> replicas = std::nullopt;
  /// Converts the parameters of all units. Full state dicts have them as the model has them, sharded ones in the form
  /// that is flattened: load these into models with the same extensions. Not with no_shard. PyTorch:
  /// _set_fsdp_extensions.
  std::shared_ptr<FlatParamExtensions> extensions = nullptr;
};

/// The groups of a rank for hybrid sharding. Consecutive ranks shard one copy of the model (`shards`); the ranks at the
/// same position in these groups have the same shard (`replicas`).
struct HybridGroups {
  ProcessGroup shards, replicas;
};
/// Creates the groups for shards over `shard_ranks` ranks. A collective. Throws `Error(invalid_argument)` unless
/// `shard_ranks` divides the size of `group`.
HybridGroups hybrid_groups(const ProcessGroup& group, int shard_ranks);

/// The form in which a state dict holds parameters.
enum class StateDictType : std::uint8_t {
  sharded,  ///< this rank's boxes, no copy; can be loaded on any number of ranks and with any strategy
  full,     ///< full tensors; copies, except of ignored tensors and of buffers that are not moved to the CPU
  /// This rank's flat parameters without the padding at their end, no copy; for the same units only, not for tensor
  /// parallel models. With `use_orig_params = false` a checkpoint of them can be loaded on any number of ranks.
  local,
};

/// The form of the tensors in a state dict. The defaults keep one full copy in memory, on rank 0, for a program that
/// saves the state. PyTorch: FullStateDictConfig and the other configs, whose defaults are false.
struct StateOptions {
  /// Of `full`: other ranks of the group get, or may pass, an empty dict. The other types ignore it.
  bool rank0_only = true;
  /// Whether tensors that are not on the CPU are copied to it. By default those of `full` are.
  std::optional<bool> offload_to_cpu = std::nullopt;
  /// Of `sharded`: returns the parameters that FSDP shards, and their optimizer state, as DTensors on this mesh, with
  /// copies of this rank's rows. One dimension of the mesh has the group that shards the model's units, and shards
  /// dimension 0 of the tensors (a tensor of size [] is replicated). The mesh also has the dimensions of a tensor
  /// parallel model's mesh, with the placements of its parameters. Further dimensions replicate, such as that of a
  /// hybrid strategy's replicas. Costs an all-gather of each unit. PyTorch: the argument `device_mesh`.
  ///
  ///     model.state_dict(StateDictType::sharded, {.mesh = DeviceMesh::from_group(model.group())});
  std::optional<DeviceMesh> mesh = std::nullopt;
};
/// The former name of StateOptions.
using FullStateOptions = StateOptions;

struct SummonOptions {
  bool writeback = true;    ///< keeps changes that `f` makes: each rank writes back its own shards
  bool rank0_only = false;  ///< other ranks see their shards; requires `writeback = false`
  /// Parameters and gradients are on the CPU. Without `rank0_only` each rank of a host has a copy of its own there,
  /// unless the ranks share the memory of their shards.
  bool offload_to_cpu = false;
  bool with_grads = false;  ///< unshards gradients, too
  /// A module of the model: only units that have parameters of it are unsharded. Null for the model itself.
  const torch::nn::Module* module = nullptr;
  /// Whether units inside `module` are unsharded, too. If not, only the unit that `module` belongs to is.
  bool recurse = true;
};

class Runtime;

/// The part of FullyShardedDataParallel that does not depend on the class of its model. A copy is the same sharded
/// model, as a copy of LibTorch's holders is the same module.
class ShardedModule {
 public:
  ShardedModule(const ShardedModule&) = default;
  ShardedModule& operator=(const ShardedModule&) = default;

  const std::shared_ptr<torch::nn::Module>& module_ptr() const;
  const ProcessGroup& group() const;
  const Options& options() const;
  void train(bool on = true);
  void eval() { train(false); }

  /// Returns the parameters to construct an optimizer from, after the model was sharded: the parameters in the module's
  /// order, or, without `use_orig_params`, the units' flat parameters followed by the ignored parameters.
  std::vector<at::Tensor> parameters() const;
  /// Throws `Error(invalid_argument)` if an optimizer works on any other tensors or has state of other sizes, as one
  /// that was constructed before the model was sharded. The message states how to construct it.
  void check_optimizer(const torch::optim::Optimizer& optimizer) const;
  void zero_grad();
  /// Calls `f` for the model and each of its submodules, as Module::apply, in summon_full_params: changes of parameters
  /// are kept. A collective. Throws whenever summon_full_params throws.
  void apply(FunctionRef<void(torch::nn::Module& module)> f);
  /// Returns the total time that this rank has waited for communication in forward and backward.
  double communication_seconds() const;

  /// Returns the number of units that have parameters. The first is the model itself, if it has parameters that are in
  /// no other unit; the others follow in the order of the model's submodules, inner units before outer ones.
  std::size_t unit_count() const;
  /// Returns the parameters of a unit. Throws `Error(invalid_argument)` if there is no such unit, as does `unit_name`.
  const FlatParamHandle& handle(std::size_t unit) const;
  /// Returns the name of the unit's module in the model; "" for the model itself.
  const std::string& unit_name(std::size_t unit) const;

  /// Starts to gather the units that have parameters of `module`, before their calls need them: all units by default;
  /// without `recurse` only the unit that `module` belongs to. The parameters stay shards until the units are called. A
  /// call of a unit waits until it is gathered, as does `wait()` of the result. What was gathered is freed after the
  /// call like that of any unit.
  ///
  ///     model.unshard();                           // while the next batch is read
  ///     loss_of(model(read_batch()), targets).backward();
  ///
  /// Outside of forward and backward this is a collective. In forward, where a model calls `unshard()` of a Wrap, it is
  /// one of the calls of units that all ranks make in the same order, and is not compared by a collective of its own.
  /// It has no effect in backward, where activation checkpointing repeats a forward, in summon_full_params, and on
  /// units that are gathered between a forward and its backward. If `unshard` or a backward under no_sync left a unit
  /// gathered, it is gathered again. Throws `Error(invalid_argument)` if `module` is not in the model. The next forward
  /// throws the same error if this rank's shard was changed in between; call `unshard` after the optimizer's step, or
  /// `reshard`. PyTorch: `_unshard(async_op=True)`.
  UnshardHandle unshard(const torch::nn::Module* module = nullptr, bool recurse = true);
  /// Frees what is gathered of these units: by unshard, or between a forward and its backward, which gathers it again.
  /// A collective. Throws `Error(invalid_argument)` in forward and backward, and if `module` is not in the model.
  void reshard(const torch::nn::Module* module = nullptr, bool recurse = true);

  /// A scope in which backward accumulates gradients without communication. The first backward after it reduces them
  /// all; those of units that it does not reach are reduced at its end. With `off` the scope has no effect: `auto guard
  /// = model.no_sync(is_last_of_the_batch)`. Throws `Error(invalid_argument)` in forward and backward.
  ///
  /// Units that are not resharded after forward (shard_grad_op, hybrid_shard_zero2) stay gathered after such a
  /// backward, so the next forward gathers nothing. That forward compares this rank's gathered part with its shard: if
  /// an optimizer or the program has changed the shard, it throws `Error(invalid_argument)`. Call `reshard` after such
  /// a change.
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
  [[nodiscard]] NoSync no_sync(bool off = false) { return {runtime(), off}; }

  /// Replaces the reduction of all units' gradients, from the next backward on; see CommHook. All ranks must call it. A
  /// collective. Throws `Error(invalid_argument)` if a hook is registered or `hook` is null, `Error(unsupported)` with
  /// a hybrid strategy.
  void register_comm_hook(CommHook hook);

  /// Calls `hook` in backward for each unit once its gradient has been reduced and no call of it remains: the gradient
  /// is visible as `grad` of the unit's parameters, or of its flat parameter, and both may be changed. An optimizer
  /// that steps there, and sets the gradients to none, keeps only the gradients of a few units in memory:
  ///
  ///     model.register_post_reduce_hook([&](std::size_t unit) {
  ///       optimizers[unit].step();  // of model.handle(unit).params()
  ///       optimizers[unit].zero_grad();
  ///     });
  ///
  /// Checkpoint the activations inside units (`Wrap<Checkpointed<Block>>`): if a checkpointed call contains calls of
  /// units, it is not known how many of them remain, and the hook is called for these units at the end of backward. The
  /// same holds for units that a program's own autograd::Function calls in its backward. Backwards that other hooks
  /// compute in the middle of this one are not counted: if one reaches a unit after that, the hook is called again.
  ///
  /// Not called by a backward under no_sync. A new hook replaces the previous one; null removes it. Does not
  /// communicate. Throws `Error(invalid_argument)` in forward and backward.
  void register_post_reduce_hook(std::function<void(std::size_t unit)> hook);

  /// Scales all gradients so that their joint norm over the shards of all ranks is at most `max_norm`. Returns the norm
  /// before scaling, on the device of computation and in the dtype that this rank's gradients promote to, float32 if it
  /// has none. The norm is computed in float64, and the host does not wait for the device, unless gradients are on the
  /// CPU (offload_params). `norm_type` is any number above 0, or infinity. A collective. Throws
  /// `Error(invalid_argument)` if a gradient has not been reduced, or if `max_norm` is negative or NaN.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0);

  /// Runs `f` while the parameters are unsharded, in their own dtype, and gradients are disabled. `f` may call the
  /// model or its units as if they were not sharded. A collective. Throws `Error(invalid_argument)` in forward or
  /// backward, and if `f` leaves a parameter or gradient of another shape that would be written back. If `f` throws on
  /// any rank, nothing is written back and every rank throws. What is gathered between a forward and its backward
  /// stays, unless a rank changes its shard of it.
  void summon_full_params(FunctionRef<void()> f, const SummonOptions& options = {});

  /// Returns parameters and buffers under their names in the module that was wrapped. If units have groups of their
  /// own, returns those that this rank has, and `full` requires `rank0_only = false`. A collective if `type` is `full`
  /// or there is a mesh. Throws `Error(invalid_argument)` if the mesh lacks a dimension that it must have.
  StateDict state_dict(StateDictType type = StateDictType::sharded, const StateOptions& options = {});
  /// Loads a state dict of any type that state_dict returned, on any number of ranks; also DTensors on any mesh, which
  /// are gathered one by one. With `rank0_only`, ranks other than 0 may pass an empty dict. Parameters that only other
  /// ranks have are skipped. Returns the names that only the model or only the state dict has; if `strict`, they are
  /// errors. Law: either all values are set on all ranks or none. A collective. Throws `Error(invalid_argument)` naming
  /// all entries of another shape and, if `strict`, those that are missing or unexpected.
  IncompatibleKeys load_state_dict(const StateDict& state_dict, const StateOptions& options = {.rank0_only = false},
                                   bool strict = true);

  /// Returns the optimizer's state by parameter, with the keys of `get_optimizer_state_dict` for a model that is not
  /// sharded. A collective. Throws `Error(unsupported)` if `type` is `local`, whenever check_optimizer throws, and if
  /// state_dict throws for the mesh.
  StateDict optim_state_dict(const torch::optim::Optimizer& optimizer, StateDictType type = StateDictType::sharded,
                             const StateOptions& options = {});
  /// Converts a state dict that optim_state_dict returned, or a full one with the same keys, to another form. The
  /// caller may have changed its values or removed some of them, also "param_groups". All ranks must pass it. A
  /// collective. Throws as above, and `Error(invalid_argument)` naming all tensors of another shape.
  StateDict optim_state_dict(const StateDict& state_dict, StateDictType type, const StateOptions& options = {});
  /// Loads a state dict that optim_state_dict returned, on any number of ranks and with either value of
  /// `use_orig_params`. Instead of names, parameters may have numbers, as in Python's `optimizer.state_dict()` before
  /// the model was sharded: they count the optimizer's parameters or, without `use_orig_params`, those of the module
  /// (see rekey_optim_state_dict). Without "param_groups", the optimizer keeps its options. A collective. Throws
  /// whenever set_optimizer_state_dict, with `strict`, or check_optimizer throws.
  void load_optim_state_dict(torch::optim::Optimizer& optimizer, const StateDict& state_dict,
                             const StateOptions& options = {.rank0_only = false}, bool strict = true);

 protected:
  ShardedModule(std::shared_ptr<torch::nn::Module> module, const ProcessGroup& group, Options options);
  ~ShardedModule();
  Unit& root() const;

 private:
  Runtime& runtime() const;

  std::shared_ptr<Runtime> runtime_;
};

/// A model that is sharded over the ranks of a group. `Module` is a module holder, such as `Gpt` of
/// `TORCH_MODULE(Gpt)`, or a module class, in which case the constructor takes a shared_ptr.
template <typename Module>
class FullyShardedDataParallel : public ShardedModule {
  static constexpr bool kIsHolder = requires { typename Module::ContainedType; };

 public:
  using Pointer = std::conditional_t<kIsHolder, Module, std::shared_ptr<Module>>;

  /// Shards the model over the ranks of `group`. A collective.
  ///
  /// Models inside it that are sharded already, also inside ignored modules, become parts of it. Their units keep their
  /// options, groups and comm hooks, and optimizers of them stay valid. Their own objects throw from then on. PyTorch:
  /// nested FullyShardedDataParallel modules.
  ///
  ///     const fsdp::Options replicated{.strategy = ShardingStrategy::no_shard};
  ///     fsdp::FullyShardedDataParallel<Encoder> encoder(model->encoder, group, replicated);
  ///     fsdp::FullyShardedDataParallel<Model> sharded(model, group);
  ///
  /// Throws on all ranks whenever FlatParamHandle throws, and `Error(invalid_argument)` if
  /// - a parameter is in two units, or nothing initializes a parameter on meta
  /// - the model, an ignored module or an ignored parameter is sharded already
  /// - the model has parts of a larger sharded model, or of one whose object is gone
  /// - a sharded model inside it is in use, has other `use_orig_params` or `replicas`, or a post-reduce hook
  /// - units are on different devices, or options of a unit contradict those of the model
  /// - the ranks have different parts of a tensor parallel model
  ///
  /// If it throws, models inside it are unchanged.
  explicit FullyShardedDataParallel(Pointer module, const ProcessGroup& group = {}, Options options = {})
      : ShardedModule(pointer_of(module), group, std::move(options)), module_(std::move(module)) {}
  FullyShardedDataParallel(const FullyShardedDataParallel&) = default;  // and no moves, which would leave a null model
  FullyShardedDataParallel& operator=(const FullyShardedDataParallel&) = default;

  /// Returns the model itself, for its members. Call `model(x)` or `model.forward(x)`: `model->forward(x)` calls the
  /// model's own class, which does not unshard. A Wrap in it then reports "was called while its parameters are
  /// sharded". An op that takes a sharded parameter gets a one-dimensional tensor, and throws what LibTorch throws for
  /// that shape: C++ cannot intercept a call of a class that it does not define, and LibTorch discards what observers
  /// of ops throw. If no op throws, backward reports that a gradient reached a parameter outside of any call. Where the
  /// model itself is a Wrap, `model->forward(x)` is the same as `model(x)`. For the same reason `torch::save` and
  /// `clone` of a model without any Wrap see shards: call them in summon_full_params, or use state_dict.
  const Pointer& module() const { return module_; }
  auto* operator->() { return module_.operator->(); }
  auto* operator->() const { return module_.operator->(); }

  /// Calls the model's forward. A collective. If activation checkpointing or a hook calls it in backward, the call is a
  /// part of that backward. A backward of the model in its own forward throws `Error(unsupported)`.
  template <typename... Args>
  auto forward(Args&&... arguments) {
    if constexpr (std::is_base_of_v<Wrappable, std::remove_reference_t<decltype(*module_)>>) {
      return module_->call(std::forward<Args>(arguments)...);  // calls the root unit
    } else {
      // `model` is a parameter, so that a model without forward is not an error here.
      const auto forward_of = [](auto& model,
                                 auto&&... args) -> decltype(model.forward(std::forward<decltype(args)>(args)...)) {
        return model.forward(std::forward<decltype(args)>(args)...);
      };
      using Forward = decltype(forward_of);
      if constexpr (std::is_invocable_v<Forward, decltype(*module_), Args...>) {
        const auto call = [&](auto&&... args) -> std::invoke_result_t<Forward, decltype(*module_), decltype(args)...> {
          return forward_of(*module_, std::forward<decltype(args)>(args)...);
        };
        using Result = std::invoke_result_t<decltype(call), Args...>;
        return detail::call_unit_with<Result>(root(), call, std::forward<Args>(arguments)...);
      } else {
        static_assert(detail::kNever<Args...>, "the model's forward does not take these arguments, or it has none");
      }
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

template <typename Holder>
requires requires { typename Holder::ContainedType; }
explicit FullyShardedDataParallel(Holder module, const ProcessGroup& group = {}, Options options = {})
    ->FullyShardedDataParallel<Holder>;
template <typename Impl>
explicit FullyShardedDataParallel(std::shared_ptr<Impl> module, const ProcessGroup& group = {}, Options options = {})
    -> FullyShardedDataParallel<Impl>;

}  // namespace tessera::fsdp
