#pragma once
/// \file
/// Modules with sharded parameters. Each rank holds one shard of such a parameter: its part of a ShardedTensor.
///
///     struct NetImpl : torch::nn::Module {
///       ShardedEmbedding words{50000, 64};  // a torch::nn::Embedding, until its weight is sharded
///       ShardedLinear head{64, 50000};
///       at::Tensor forward(const at::Tensor& ids) { return head(words(ids)); }
///     };
///     const auto rows = std::make_shared<ChunkShardingSpec>(0, placements);
///     shard_module(*net, {{"words.weight", rows}, {"head.weight", rows}}, group);
///
/// PyTorch replaces the parameter by a ShardedTensor, which a LibTorch module cannot hold. Here the parameter keeps its
/// identity and becomes this rank's local tensor, so `parameters()` and optimizers of torch::optim work with it. The
/// module knows the ShardedTensor of each such local tensor, and computes with it.
///
/// Law of the layers below: each rank passes its own input, of the same size and dtype on all ranks, and gets what the
/// layer returned for it before it was sharded, up to rounding. Gradients of the shards and of a bias are those of the
/// sum of all ranks' losses. forward and backward are collectives of the group. So the layers are data-parallel; with
/// those of tessera/tensor/tensor_parallel.h, all ranks pass the same input.
///
/// State dicts of models and optimizers hold a DTensor for such a parameter, with the same shards on the same ranks; a
/// checkpoint stores both alike. PyTorch: torch/distributed/_shard/api.py.

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/tensor/dtensor_parameters.h"
#include "tessera/tensor/ops.h"
#include "tessera/tensor/sharded_tensor.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

/// The specs of the parameters to be sharded, by name: "layers.0.weight".
///
/// PyTorch's ShardingPlan also has `output_plan`, `return_local_tensor` and Sharders of submodules: see
/// ModuleShardingPlan in tessera/tensor/sharded/module_sharding_plan.h. The layers below return each rank's part of the
/// batch without a plan.
using ShardingPlan = std::map<std::string, ShardedTensor::SpecPtr>;

/// Shards the parameter `name` of `module` itself: that of rank `src` is sharded by `spec`, and every rank gets its
/// shard, on the device of its placement. An existing gradient is dropped, and an optimizer must not have state of the
/// parameter yet. A collective of `group`.
///
/// Every rank throws before anything changes: `Error(invalid_argument)` if on any rank `module` is not a
/// ShardedParameters, does not have the parameter, or has it on meta or sharded already; if `spec` is null or does not
/// fit; if name, size, dtype, requires_grad, `spec` or `src` differ between ranks; and if another parameter of `module`
/// or its submodules is the same tensor. Throws `Error(unsupported)` unless `spec` is a ChunkShardingSpec with one
/// shard on each rank, as PyTorch requires, and as stated below.
void shard_parameter(torch::nn::Module& module, const std::string& name, ShardedTensor::SpecPtr spec,
                     const ProcessGroup& group = {}, int src = 0);

/// Shards all parameters that `plan` names, as `shard_parameter` does. A parameter that is shared between modules is
/// sharded if the plan has an equal spec for each of its names, and otherwise refused.
void shard_module(torch::nn::Module& module, const ShardingPlan& plan, const ProcessGroup& group = {}, int src = 0);

/// Returns the sharded parameters of `module` and its submodules as the ShardedTensors whose local tensors they are, by
/// the parameter's name, the first if it has several. Since a parameter is the local shard itself, an optimizer of
/// `module.parameters()` is one of the local shards. PyTorch: named_params_with_sharded_tensor, ShardedOptimizer.
std::vector<std::pair<std::string, ShardedTensor>> named_sharded_parameters(torch::nn::Module& module);

/// Returns this rank's part of the batch from the result of ops::linear with the inputs of all ranks: [n, ..., out] of
/// [size * n, ..., out]; differentiable. A collective of the group. Throws `Error(unsupported)` for a sharded tensor
/// that is not sharded in its last dimension, with one shard on each rank, and `Error(invalid_argument)` if the first
/// size is not a multiple of the group's size.
at::Tensor local_batch(const ops::LinearResult& result);

/// Base of the modules whose parameters can be sharded. A class of your own also derives from torch::nn::Module, and
/// computes in forward with `sharded_parameter("weight", weight)` if `is_sharded("weight")`.
class ShardedParameters : public DTensorParameters {
 public:
  bool is_sharded(const std::string& parameter) const { return sharded_.count(parameter) != 0; }
  /// Returns the ShardedTensor whose local tensor is `local`, which is the module's own parameter `name`; gradients
  /// flow to it. Communicates nothing. Throws `Error(invalid_argument)` if the parameter is not sharded, or has another
  /// size or device than its shard.
  ShardedTensor sharded_parameter(const std::string& name, const at::Tensor& local) const;
  const DTensorSpec* dtensor_spec(const std::string& parameter) const override;

 protected:
  /// Throws `Error(unsupported)` if forward cannot compute with `parameter` sharded. By default, any can be.
  virtual void check_shardable(const std::string& parameter) const;
  /// Returns forward(). If it throws, notifies the other ranks, which do not compare their calls there.
  at::Tensor in_forward(FunctionRef<at::Tensor()> forward) const;
  /// Throws `Error(unsupported)` if a parameter is sharded, since `operation` would see only this rank's shard.
  void check_not_sharded(const char* operation) const;

 private:
  friend class ModuleSharder;
  struct Sharded {
    ShardedTensor::SpecPtr spec;
    ProcessGroup group;
    DTensorSpec dtensor;
  };
  std::map<std::string, Sharded> sharded_;
};

/// A linear layer whose weight can be sharded, by rows or columns; its bias cannot. Cloning a module with a sharded
/// weight, of this type or those below, throws `Error(unsupported)`.
class ShardedLinearImpl : public torch::nn::LinearImpl, public ShardedParameters {
 public:
  using LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& input);
  std::shared_ptr<Module> clone(const OptionalDevice& device = {}) const override;

 protected:
  void check_shardable(const std::string& parameter) const override;
};

/// An embedding whose weight can be sharded, by rows or columns, unless scale_grad_by_freq or sparse is set.
class ShardedEmbeddingImpl : public torch::nn::EmbeddingImpl, public ShardedParameters {
 public:
  using EmbeddingImpl::EmbeddingImpl;
  at::Tensor forward(const at::Tensor& ids);
  std::shared_ptr<Module> clone(const OptionalDevice& device = {}) const override;

 protected:
  void check_shardable(const std::string& parameter) const override;
};

/// An embedding bag that is sharded as ShardedEmbedding. All ranks must pass the same number of bags.
class ShardedEmbeddingBagImpl : public torch::nn::EmbeddingBagImpl, public ShardedParameters {
 public:
  using EmbeddingBagImpl::EmbeddingBagImpl;
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& offsets = {}, const at::Tensor& per_sample_weights = {});
  std::shared_ptr<Module> clone(const OptionalDevice& device = {}) const override;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())}, {2, torch::nn::AnyValue(at::Tensor())})
  void check_shardable(const std::string& parameter) const override;
};

TORCH_MODULE(ShardedLinear);
TORCH_MODULE(ShardedEmbedding);
TORCH_MODULE(ShardedEmbeddingBag);

}  // namespace tessera
