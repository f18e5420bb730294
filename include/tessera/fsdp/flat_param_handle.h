#pragma once
/// \file
/// Parameters that are flattened into one, cut over the ranks of a group, and put together when they are needed.
///
/// The parameters keep their identity: who holds one, holds it for good. What changes is their data. While *unsharded*
/// they are views of the unsharded flat parameter, whose one storage is freed and allocated again, so that what
/// autograd saved of them is right again once it is filled again. While *sharded* they are, with `use_orig_params`, the
/// one-dimensional piece of this rank's shard that is theirs, and empty without it or where none is; then the flat
/// parameter is what an optimizer works on. What isn't sharded at all keeps its shape.
///
/// Gradients: what backward has accumulated in a parameter is taken from it into the unsharded flat gradient, which is
/// averaged over the ranks, and of which this rank's shard is then the gradient of its piece of the parameters.
///
/// Every function that communicates is a collective of `group`. A handle is used by one thread at a time.
///
/// To measure what communication costs: with FSDP_USE_FAKE_ALL_GATHER=1 in the environment of its constructor nothing
/// is gathered and what other ranks have is 0, with FSDP_USE_FAKE_REDUCE=1 nothing is reduced. What is learned then is
/// nonsense. PyTorch: torch/distributed/fsdp/_flat_param.py.

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/process_group.h"
#include "tessera/fsdp/options.h"
#include "tessera/layout/flat_param_layout.h"

namespace tessera::fsdp {

/// A parameter and one of its names. The same tensor under several names is one parameter.
struct NamedParameter {
  std::string fqn;
  at::Tensor parameter;
};

/// What parameters become before they are flattened, and again when they are whole. PyTorch: FSDPExtensions.
class FlatParamExtensions {
 public:
  virtual ~FlatParamExtensions() = default;
  /// The tensor to flatten for a parameter.
  virtual at::Tensor pre_flatten_transform(const std::string& fqn, const at::Tensor& parameter);
  /// What the parameter is to be, as a view of `view`, which has the shape of what was flattened. Also of gradients.
  virtual at::Tensor post_unflatten_transform(const std::string& fqn, const at::Tensor& view);
};

struct FlatParamOptions {
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  MixedPrecision mixed_precision;
  bool use_orig_params = true;
  /// Where parameters compute and ranks communicate.
  at::Device device = at::kCPU;
  /// Shards and their gradients are on CPU but while they compute.
  bool offload_params = false;
  /// With a hybrid strategy, and only then: the ranks that have the same shard, one of each group.
  std::optional<ProcessGroup> replicas;
  std::shared_ptr<FlatParamExtensions> extensions;
};

/// What is done with a handle's parameters. PyTorch: HandleTrainingState.
enum class TrainingState : std::uint8_t { idle, forward, backward_pre, backward_post, summon_full_params };

class FlatParamHandle {
 public:
  /// Flattens and shards: on return the parameters are sharded. A collective. Throws on all ranks
  /// `Error(invalid_argument)` for parameters that differ between ranks, in dtype or device, of no floating-point
  /// dtype, that are no leaves, some of which need gradients and some don't (unless `use_orig_params`), and for what
  /// FlatParamLayout refuses.
  FlatParamHandle(const std::vector<NamedParameter>& params, const ProcessGroup& group,
                  const FlatParamOptions& options);
  FlatParamHandle(const FlatParamHandle&) = delete;
  FlatParamHandle& operator=(const FlatParamHandle&) = delete;

  const FlatParamLayout& layout() const { return layout_; }
  const ProcessGroup& group() const { return group_; }
  const FlatParamOptions& options() const { return options_; }
  /// This rank's shard, of layout().sharded_numel() elements of the parameters' dtype: a leaf, which is what an
  /// optimizer works on without `use_orig_params`.
  const at::Tensor& flat_param() const { return flat_param_; }
  /// Each once, in the layout's order.
  const std::vector<at::Tensor>& params() const { return params_; }
  /// The parameters of which this rank has a part. PyTorch: shard_metadata.
  FlatParamShardMetadata shard_metadata() const { return layout_.shard_metadata(shard_rank()); }

  /// Idle unless whoever trains with it says otherwise.
  TrainingState training_state() const { return training_state_; }
  void set_training_state(TrainingState state) { training_state_ = state; }

  // --- parameters

  /// Begins to put the parameters together; they stay as they are. Nothing to do if that was begun or done.
  void start_unshard();
  /// Waits for it, having begun it if need be: the parameters are whole, of `param_dtype`.
  void unshard();
  /// The parameters are sharded again. If their memory is kept, the next unshard() communicates nothing; whoever
  /// changes the shard before that must say free_unsharded().
  void reshard(bool frees_unsharded = true);
  void free_unsharded();
  bool is_unsharded() const { return is_unsharded_; }
  /// Whether unshard() was begun, and the memory isn't freed.
  bool is_gathered() const { return is_gathered_; }
  /// Whether unshard() gives the parameters' own dtype, whatever `param_dtype` says. Only while nothing is gathered.
  void use_full_precision(bool on);
  /// The unsharded parameters become copies on CPU until reshard(), and the memory where they compute is freed.
  void to_cpu();
  /// Takes what the unsharded parameters hold into the shard: on each rank what it has of it.
  void write_back_unsharded();
  /// `tensors`, one for each parameter and of its shape, as one: as the unsharded flat parameter has them, with zeros
  /// between and behind them. The reverse of unflatten_as.
  at::Tensor flatten_tensors(const std::vector<at::Tensor>& tensors) const;
  /// Each parameter in `flat`, which is as long as the unsharded flat parameter: views.
  std::vector<at::Tensor> unflatten_as(const at::Tensor& flat) const;
  /// This rank's elements of parameter `i` in `shard`, which is as long as its shard: a one-dimensional view, empty if
  /// it has none.
  at::Tensor piece_of(const at::Tensor& shard, std::size_t i) const;
  /// The same elements out of the whole parameter, in its shape, whatever its strides.
  at::Tensor piece_of_full(const at::Tensor& whole, std::size_t i) const;
  /// The rank whose shard in layout() this rank has: 0 where nothing is cut.
  std::int64_t shard_rank() const { return is_sharded(options_.strategy) ? group_.rank() : 0; }

  /// Takes what was put in a sharded parameter's place (`set_data`) into the shard, unless FSDP_SKIP_WRITEBACK_CHECK is
  /// 1. Whether there was any. Throws `Error(invalid_argument)` if it has another number of elements.
  bool write_back_params();

  // --- gradients

  /// Sets aside what gradient the shard has, to be added to, so that backward begins with none. Parameters whose
  /// gradient was dropped (`zero_grad`) lose it.
  void prepare_gradient_for_backward();
  /// Takes what backward has accumulated in parameter `i`, if it has. Throws `Error(unsupported)` for a gradient that
  /// itself needs one.
  void take_gradient(std::size_t i);
  /// Whether anything was taken that hasn't been reduced.
  bool has_unsharded_gradient() const { return unsharded_grad_.defined(); }
  /// Begins to average what was taken, 0 where nothing was, over all ranks.
  void start_reduce_gradient();
  /// Waits for it and adds it to what was set aside.
  void finish_reduce_gradient();
  /// Makes the gradient that of the sharded parameters and of the flat parameter. What wasn't reduced yet is theirs as
  /// it is, whole.
  void prepare_gradient_for_optim();
  /// Of this rank's shard; undefined if there is none.
  const at::Tensor& sharded_gradient() const { return sharded_grad_; }
  /// Gives the unsharded parameters their whole gradients, those that have any. A collective. Throws
  /// `Error(invalid_argument)` if some weren't reduced.
  void unshard_grad();
  /// The gradients are sharded again; what was done to the whole ones is not kept.
  void reshard_grad() { prepare_gradient_for_optim(); }

 private:
  struct Whole {
    at::Tensor flat;  // flat_param_'s own memory where nothing is to be gathered, cast or brought to another device
    std::vector<at::Tensor> views;
  };

  at::Device home() const;
  Whole make_full(at::ScalarType dtype) const;
  at::Tensor view_of(const at::Tensor& unsharded, std::size_t i) const;
  at::Tensor flat_view_of(const at::Tensor& unsharded, std::size_t i) const;
  at::Tensor sharded_view_of(const at::Tensor& shard, std::size_t i) const;
  at::Tensor my_part_of(const at::Tensor& unsharded) const;
  void use(const std::vector<at::Tensor>& views);
  at::Tensor visible_gradient(std::size_t i) const;
  void drop_gradient();
  void put_gradient(std::size_t i, const at::Tensor& grad);
  void zero_the_rest();
  int averaged_ranks() const;

  struct Switches {  // of the environment, when this was made
    bool skips_writeback, fakes_all_gather, fakes_reduce;
    static Switches now();
  };

  FlatParamOptions options_;
  Switches switches_ = Switches::now();
  ProcessGroup group_;
  FlatParamLayout layout_;
  at::ScalarType compute_dtype_, reduce_dtype_;
  std::vector<at::Tensor> params_;
  at::Tensor flat_param_;
  Whole whole_;
  std::vector<at::Tensor> sharded_views_;
  PendingCollective gathering_;
  bool is_gathered_ = false, is_unsharded_ = false;
  TrainingState training_state_ = TrainingState::idle;

  at::Tensor unsharded_grad_;      // what was taken, of compute_dtype_
  at::Tensor reducing_, reduced_;  // what is being reduced, and what it becomes
  PendingCollective reduction_;
  at::Tensor sharded_grad_;
  struct HasGradient {
    bool unsharded = false, sharded = false;  // in unsharded_grad_, in sharded_grad_
  };
  std::vector<HasGradient> has_;  // by parameter
};

}  // namespace tessera::fsdp
