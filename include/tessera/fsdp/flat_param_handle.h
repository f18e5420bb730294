#pragma once
/// \file
/// A group of parameters stored as one flat parameter, sharded over the ranks of a group and unsharded on demand.
///
/// The parameters keep their identity: a reference to one stays valid. Only their data changes. While *unsharded*, they
/// are views of the unsharded flat parameter. Its single storage is freed and allocated again, so tensors that autograd
/// saved become valid again once the storage has been refilled. While *sharded* with `use_orig_params`, each parameter
/// is one-dimensional and has only its elements in this rank's shard, maybe none. While sharded without
/// `use_orig_params`, the parameters are empty and the optimizer works on the flat parameter. With
/// `ShardingStrategy::no_shard` parameters keep their shapes.
///
/// Gradients: the handle moves each gradient that backward has accumulated in a parameter into the unsharded flat
/// gradient, then averages that over the ranks. This rank's shard of the average becomes the gradient of its pieces.
///
/// Every function that communicates is a collective of `group`. A handle may be used by one thread at a time.
///
/// If all ranks of the group are on one host, the unsharded flat parameter on the CPU is one piece of memory that they
/// share, and each rank's shard is a part of it if `param_dtype` is that of the parameters. Nothing is copied then:
/// unsharding waits until all ranks have called it, and resharding until all have resharded, after which shards may be
/// written to. Outside of a summon, no other rank sees what a rank writes to unsharded parameters, and the rank loses
/// it when it reshards after backward, or after forward if no backward follows. TESSERA_HOST_MEMORY=0 in the
/// environment of any rank turns this off.
///
/// Two environment variables, read by the constructor, help to measure the cost of communication; training results are
/// meaningless with either. FSDP_USE_FAKE_ALL_GATHER=1 gathers nothing and sets the other ranks' elements to 0.
/// FSDP_USE_FAKE_REDUCE=1 reduces nothing. PyTorch: torch/distributed/fsdp/_flat_param.py.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/comm/process_group.h"
#include "tessera/fsdp/options.h"
#include "tessera/layout/flat_param_layout.h"

namespace tessera::comm {
class SharedMemory;
class Mark;
}  // namespace tessera::comm

namespace tessera::fsdp {

/// A parameter and one of its names. A tensor that is listed under several names is one parameter.
struct NamedParameter {
  std::string fqn;
  at::Tensor parameter;
};

/// An interface that converts parameters before they are flattened and after they are unsharded. PyTorch:
/// FSDPExtensions.
class FlatParamExtensions {
 public:
  virtual ~FlatParamExtensions() = default;
  /// Returns the tensor to flatten for a parameter.
  virtual at::Tensor pre_flatten_transform(const std::string& fqn, const at::Tensor& parameter);
  /// Returns the parameter as a view of `view`, which has the shape that was flattened. Also called for gradients.
  virtual at::Tensor post_unflatten_transform(const std::string& fqn, const at::Tensor& view);
};

/// A function that reduces the gradient of a flat parameter, in place of the average over the ranks of `group`. Starts
/// to compute `shard`, this rank's elements of the result, from `gradient`, this rank's unsharded gradient; with
/// `no_shard` both are one tensor. Returns a function that blocks until `shard` is complete. Both tensors are
/// one-dimensional, in the dtype of reductions, and stay valid until then. Called on all ranks in the same order.
/// PyTorch: register_comm_hook.
using CommHook = std::function<std::function<void()>(const at::Tensor& gradient, const at::Tensor& shard,
                                                     const ProcessGroup& group)>;

struct FlatParamOptions {
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  MixedPrecision mixed_precision;
  bool use_orig_params = true;
  /// The device of computation and communication.
  at::Device device = at::kCPU;
  /// Keeps shards and their gradients on CPU except during computation.
  bool offload_params = false;
  /// The ranks that have the same shard, one of each sharding group. Required by the hybrid strategies; an error with
  /// any other.
  std::optional<ProcessGroup> replicas;
  std::shared_ptr<FlatParamExtensions> extensions;
};

/// The phase of training that a handle's parameters are used in. PyTorch: HandleTrainingState.
enum class TrainingState : std::uint8_t { idle, forward, backward_pre, backward_post, summon_full_params };

class FlatParamGradient;
class Streams;

class FlatParamHandle {
 public:
  /// Flattens and shards the parameters; they are sharded on return. A collective. Throws `Error(invalid_argument)` on
  /// all ranks if the parameters differ between ranks, differ in dtype or device, have no floating-point dtype, are not
  /// leaves, belong to another handle or are the shards of one that was destroyed, or, without `use_orig_params`,
  /// differ in `requires_grad`; and whenever FlatParamLayout throws.
  FlatParamHandle(const std::vector<NamedParameter>& params, const ProcessGroup& group,
                  const FlatParamOptions& options);
  ~FlatParamHandle();
  FlatParamHandle(const FlatParamHandle&) = delete;
  FlatParamHandle& operator=(const FlatParamHandle&) = delete;

  /// Returns whether a handle has this parameter, or has it as its flat parameter.
  static bool has(const at::Tensor& parameter);
  /// Returns whether the parameter still holds a shard of a handle that was destroyed.
  static bool is_left_over(const at::Tensor& parameter);

  const FlatParamLayout& layout() const { return layout_; }
  const ProcessGroup& group() const { return group_; }
  const FlatParamOptions& options() const { return options_; }
  /// Adds `prefix` to the names of all parameters, which makes them names in an outer module.
  void add_prefix(const std::string& prefix) { layout_.add_prefix(prefix); }
  /// Returns this rank's shard: a leaf of layout().sharded_numel() elements in the parameters' dtype. Without
  /// `use_orig_params` the optimizer works on it.
  const at::Tensor& flat_param() const { return flat_param_; }
  /// Returns each parameter once, in the layout's order.
  const std::vector<at::Tensor>& params() const { return params_; }
  /// Returns the unsharded flat parameter in each dtype that unshard() can give it. Unsharded parameters, and views of
  /// them that autograd saved, share its storage, which is empty while nothing is gathered.
  std::vector<at::Tensor> unsharded_flat_params() const;
  /// Returns whether gradients are reduced: whether a parameter, or without `use_orig_params` the flat parameter,
  /// requires a gradient now.
  bool requires_grad() const;
  /// Calls `f` while the parameters have the shapes and dtype of unsharded ones, but no memory.
  void with_unsharded_shapes(FunctionRef<void()> f);
  /// Returns the parameters that this rank has a piece of. PyTorch: shard_metadata.
  FlatParamShardMetadata shard_metadata() const { return layout_.shard_metadata(shard_rank()); }

  /// Returns the state that the caller has set, idle by default.
  TrainingState training_state() const { return training_state_; }
  void set_training_state(TrainingState state) { training_state_ = state; }

  // --- parameters

  // On a device, the parameters are gathered on a stream of their own, and "blocks" below means that the current stream
  // waits, not the host, unless the backend communicates on the host.

  /// Starts to gather the parameters, which stay sharded. Does nothing if they are being gathered or are gathered.
  void start_unshard();
  /// Blocks until what start_unshard() started completes.
  void wait_unshard();
  /// Unshards the parameters, in `param_dtype`. Calls start_unshard() if necessary, then blocks until it completes.
  void unshard();
  /// Shards the parameters again. A collective if the ranks share memory. Without `frees_unsharded` their gathered
  /// memory is kept and the next unshard() does not communicate; if the shard changes before that, all ranks must call
  /// free_unsharded().
  void reshard(bool frees_unsharded = true);
  /// Frees the gathered memory unless the parameters are unsharded. A collective if the ranks share memory. On a device
  /// it is held until another unit needs it.
  void free_unsharded();
  /// Returns whether the unsharded flat parameter is in memory that the ranks share.
  bool shares_memory() const { return computing_.host != nullptr; }
  /// If the ranks share memory, blocks until all of them have called it. After that, shards may be written to.
  /// reshard() does this itself, unless a FullyShardedDataParallel does it once for all units. Returns false if they
  /// share no memory.
  bool meet_after_reshard();
  bool is_unsharded() const { return is_unsharded_; }
  /// Returns whether start_unshard() was called and the memory has not been freed since.
  bool is_gathered() const { return unsharded_->is_gathered; }
  /// Returns whether the gathered elements of this rank's shard still equal the shard, bit by bit. Returns true if
  /// nothing is gathered or needs to be. Compares all elements of the shard. On a device, where the host would have to
  /// wait for that, and in memory that ranks share, which is the shard itself, checks instead whether ops have written
  /// to the shard or its pieces since; if they have in shared memory, compares a checksum.
  bool is_gathered_current();
  /// As unshard(), in the parameters' own dtype and without changing what is gathered for forward and backward. The
  /// parameters must be sharded. Takes the memory of an unsharded flat parameter until end_summon(). If ranks share
  /// memory that has the parameters in their own dtype, and nothing is gathered in it, this rank reads that memory
  /// instead, and only pages that it writes to are copied.
  void summon();
  /// Shards the parameters again after summon().
  void end_summon();
  /// Returns whether write_back_params() has changed the shard since it was gathered.
  bool is_stale() const { return unsharded_->is_stale; }
  /// Sets whether unshard() and reductions use the parameters' own dtype instead of `param_dtype` and `reduce_dtype`.
  /// Frees what is gathered in the other dtype; the parameters must be sharded.
  void use_full_precision(bool on);
  /// Shares the streams and the freed memory of other handles. Nothing may be gathered or pending.
  void use_streams(std::shared_ptr<Streams> streams);
  /// Replaces the unsharded parameters by copies on CPU until reshard(), and frees their memory on the device.
  void to_cpu();
  /// Throws `Error(invalid_argument)` if an unsharded parameter, or with `with_grads` its gradient, has another shape.
  void check_unsharded(bool with_grads) const;
  /// Copies the values of the unsharded parameters into the shards, on each rank those of its own shard. Throws if
  /// check_unsharded would.
  void write_back_unsharded();
  /// Returns `tensors`, one per parameter and of its shape, flattened in the layout of the unsharded flat parameter.
  /// Padding is 0. The inverse of unflatten_as.
  at::Tensor flatten_tensors(const std::vector<at::Tensor>& tensors) const;
  /// Returns a view of each parameter in `flat`, which has as many elements as the unsharded flat parameter.
  std::vector<at::Tensor> unflatten_as(const at::Tensor& flat) const;
  /// Returns this rank's elements of parameter `i` in `shard`, which has as many elements as this rank's shard: a
  /// one-dimensional view, empty if the rank has none.
  at::Tensor piece_of(const at::Tensor& shard, std::size_t i) const;
  /// Returns a full parameter, or another tensor of its shape, in the form that is flattened.
  at::Tensor flattened_form(const at::Tensor& full, std::size_t i) const;
  /// Returns the elements that `piece_of` returns, taken from `full`, a full parameter in that form with any strides.
  at::Tensor piece_of_full(const at::Tensor& full, std::size_t i) const;
  /// Returns the rank whose shard in layout() this rank has. 0 with `no_shard`.
  std::int64_t shard_rank() const { return is_sharded(options_.strategy) ? group_.rank() : 0; }

  /// Copies data that was assigned to sharded parameters (`set_data`) into the shard, unless
  /// FSDP_SKIP_WRITEBACK_CHECK=1 was set when the handle was constructed. Returns whether there was any. What is
  /// gathered stays as it is, because only some ranks may have such data. Throws `Error(invalid_argument)` if it has
  /// another number of elements than the piece that it replaces, and if a parameter was converted to another dtype or
  /// moved to another device.
  bool write_back_params();

  // --- gradients. Functions that are called in the wrong order throw `Error(invalid_argument)`: those of unsharded
  // gradients while the parameters are sharded, and those of another reduction while one is pending.

  /// Frees the gradients of parameters whose visible gradient was reset (`zero_grad`).
  void drop_reset_gradients();
  /// Calls drop_reset_gradients(), then takes over the gradients that were assigned. Throws `Error(invalid_argument)`
  /// if an assigned gradient has another number of elements than this rank's piece.
  void adopt_visible_gradients();
  /// Calls adopt_visible_gradients(), then sets aside the sharded gradient, which the next reduction adds to, and
  /// resets the visible gradients so that backward starts without any.
  void prepare_gradient_for_backward();
  /// Moves the gradient that backward has accumulated in parameter `i`, if any, into the unsharded gradient. Throws
  /// `Error(unsupported)` if that gradient itself requires a gradient.
  void take_gradient(std::size_t i);
  /// Returns whether a gradient was taken that has not been reduced.
  bool has_unsharded_gradient() const;
  /// Replaces the reduction; null restores the average. Must not be called while a reduction is pending.
  void set_comm_hook(CommHook hook);
  /// Starts to average the gradients that were taken over all ranks. Parameters without one contribute 0.
  void start_reduce_gradient();
  /// With `replicas`, blocks until the sum over the ranks of the group is complete and starts that over the replicas.
  /// finish_reduce_gradient() does it if necessary.
  void continue_reduce_gradient();
  /// Blocks until the reduction completes, and adds its result to the gradient that was set aside.
  void finish_reduce_gradient();
  /// Makes the gradient visible as the `grad` of the sharded parameters or of the flat parameter. A gradient that has
  /// not been reduced becomes visible unsharded.
  void prepare_gradient_for_optim();
  /// Returns the gradient of this rank's shard, undefined if there is none.
  const at::Tensor& sharded_gradient() const;
  /// Sets the `grad` of the unsharded parameters to their full gradients; a parameter that has none on any rank is left
  /// alone. A collective. Throws `Error(invalid_argument)` on all ranks if a gradient has not been reduced.
  void unshard_grad();
  /// Copies the full gradients that unshard_grad() set, or others that were assigned since, into the sharded gradient,
  /// on each rank those of its own shard. Throws if check_unsharded would.
  void write_back_unsharded_grad();
  /// Makes the sharded gradients visible again.
  void reshard_grad() { prepare_gradient_for_optim(); }

 private:
  friend class FlatParamGradient;

  struct Unsharded {
    at::Tensor flat;  // shares flat_param_'s storage if nothing needs to be gathered, cast or copied to a device
    std::vector<at::Tensor> views;
    PendingCollective gathering;
    at::Tensor input;                       // of `gathering`, if it is a copy of the shard
    std::shared_ptr<comm::Mark> gathered;   // the end of `gathering`; null until that was waited for
    std::vector<std::uint32_t> versions;    // of the shard and its pieces when they were gathered, if that is compared
    std::optional<std::uint32_t> checksum;  // of the shard when it was resharded and kept, if it is part of `flat`
    std::shared_ptr<comm::SharedMemory> host;  // what `flat` is a view of; null if it has memory of its own
    bool is_gathered = false, is_stale = false;
  };

  at::Device shard_device() const;
  void use(Unsharded& unsharded);
  std::vector<std::uint32_t> versions() const;
  void finish_gathering();
  void free_gathered();
  std::shared_ptr<comm::SharedMemory> make_host_memory() const;
  at::Tensor part_of(const comm::SharedMemory& host) const;
  bool has_shard_in_host_memory() const;
  std::uint32_t shard_checksum() const;
  void start_unshard_in_host_memory();
  at::Tensor make_shard(at::ScalarType dtype, const std::shared_ptr<comm::SharedMemory>& host) const;
  Unsharded make_unsharded(at::ScalarType dtype, std::shared_ptr<comm::SharedMemory> host = nullptr) const;
  at::Tensor view_of(const at::Tensor& unsharded, std::size_t i) const;
  at::Tensor flat_view_of(const at::Tensor& unsharded, std::size_t i) const;
  at::Tensor sharded_view_of(const at::Tensor& shard, std::size_t i) const;
  at::Tensor shard_of(const at::Tensor& unsharded) const;
  void set_params(const std::vector<at::Tensor>& views);
  void expect_unsharded(std::string_view function) const;

  struct Switches {  // environment variables, read by the constructor
    bool skips_writeback, fakes_all_gather;
    static Switches now();
  };

  FlatParamOptions options_;
  Switches switches_ = Switches::now();
  ProcessGroup group_;
  FlatParamLayout layout_;
  at::ScalarType compute_dtype_;
  std::shared_ptr<Streams> streams_;
  std::vector<at::Tensor> params_;
  at::Tensor flat_param_;
  Unsharded computing_;       // in compute_dtype_
  Unsharded full_precision_;  // in the parameters' own dtype, if that is another
  Unsharded summoned_;        // from summon() to end_summon()
  Unsharded* unsharded_ = &computing_;
  Unsharded* before_summon_ = nullptr;
  std::vector<at::Tensor> sharded_views_;
  bool is_unsharded_ = false, in_full_precision_ = false;
  TrainingState training_state_ = TrainingState::idle;
  std::unique_ptr<FlatParamGradient> gradient_;
};

}  // namespace tessera::fsdp
