#pragma once
/// \file
/// Tensor parallelism: layers whose parameters are sharded over ranks, each of which computes with its part.
///
///     struct MlpImpl : torch::nn::Module {
///       ParallelLinear up{64, 256}, down{256, 64};  // a torch::nn::Linear each, until it is parallelized
///       at::Tensor forward(const at::Tensor& x) { return down(at::relu(up(x))); }
///     };
///     parallelize_module(*mlp, mesh["tp"], {{"up", ColwiseParallel{}}, {"down", RowwiseParallel{}}});
///
/// Laws: a parallelized module gives the same results and gradients as the original module on the full tensors, up to
/// rounding. Parameters keep their identity and become local tensors. Inputs and results are local tensors too, with
/// the placements that the style specifies. A column-wise layer followed by a row-wise layer sends nothing between
/// them.
///
/// forward and backward are collectives of the mesh's ranks. On a 2-D mesh, FSDP shards the local tensors again:
/// parallelize along one dimension first, then pass FullyShardedDataParallel the other one's group, `mesh.group("dp")`.
/// PyTorch: torch/distributed/tensor/parallel.

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/dtensor_parameters.h"
#include "tessera/tensor/parallel/prepare_module.h"
#include "tessera/tensor/philox_generator.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

/// A style that shards a linear layer [out, in] by rows and an embedding [rows, width] by columns. The result is
/// sharded by columns.
struct ColwiseParallel {
  Placement input_layout = Placement::replicate();  ///< of the given input, which the layer unshards
  Placement output_layout = Placement::shard(-1);   ///< of the result
};

/// A style that shards a linear layer by columns and an embedding by rows. The ranks' results are summed.
struct RowwiseParallel {
  /// Of the given input. By default it is sharded along its last dimension for a linear layer, as the layer needs it,
  /// and replicated for an embedding. PyTorch has no default for an embedding.
  std::optional<Placement> input_layout = std::nullopt;
  Placement output_layout = Placement::replicate();  ///< of the result
};

/// A style that runs a layer norm, an RMS norm or a dropout on an input that is sharded along `sequence_dim`, as is the
/// result. The parameters, if any, are replicated.
struct SequenceParallel {
  std::int64_t sequence_dim = 1;
};

using ParallelStyle = std::variant<ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput,
                                   PrepareModuleOutput, PrepareModuleInputOutput>;
/// Returns "ColwiseParallel", ...
std::string to_string(const ParallelStyle& style);

/// Styles by module name ("layers.0.up"). Each part of a name may be a shell pattern ("layers.*.up", "net?",
/// "net[1-2]"); "" is the module itself.
using ParallelPlan = std::vector<std::pair<std::string, ParallelStyle>>;

/// Parallelizes the submodules of `module` that `plan` names along the only dimension of `mesh`. The parameters of
/// `src_data_rank`, a rank of the mesh, are sharded and distributed; if it is nullopt, each rank takes its part of its
/// own. Parameters on meta are sharded without communication. Existing gradients are dropped. Does nothing on a rank
/// outside of the mesh. A collective of the mesh's ranks.
///
/// Every rank throws before anything changes: `Error(unsupported)` as stated below, and `Error(invalid_argument)` for
/// - a mesh of several dimensions, or a `src_data_rank` that the mesh does not have
/// - a name that matches no module, or a module that several names match with the same kind of style
/// - a module that is not of a type below (or a PreparedModule for its styles), or is already parallelized or sharded
/// - a style that the module does not have, or a partial layout of a layer
/// - a parameter that the style does not place
/// - a parameter that is shared with another module, unless both get the same part of it
void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan,
                        std::optional<std::int64_t> src_data_rank = 0);

/// Gives the parameters of the parallel layers in `module` new random values: the same on any mesh, and without a
/// parallel plan. They have the distributions of LibTorch's layers, not their numbers. Parameters on meta get memory on
/// `device` first. All ranks must pass equal generators; nothing is communicated. Parameters of other modules stay as
/// they are. PyTorch: `to_empty` and `reset_parameters` of a parallelized module.
void initialize_parameters(torch::nn::Module& module, PhiloxGenerator& generator, at::Device device = at::kCPU);

/// Base of the modules that can be parallelized.
class TensorParallel : public DTensorParameters {
 public:
  bool is_parallelized() const { return state_.has_value(); }
  const DTensorSpec* dtensor_spec(const std::string& parameter) const override;
  /// Gives the module's own parameters, which have memory, new values, as `initialize_parameters`.
  virtual void initialize(PhiloxGenerator& generator);

 protected:
  /// How a style applies to a module.
  struct Parallelization {
    struct Parameter {
      Placement placement;
      std::vector<std::int64_t> size;
    };
    std::map<std::string, Parameter> parameters;  ///< every parameter of the module
    Placement input, computes_with, output;       ///< of the given input, the input of the computation, and the result
  };
  /// Throws `Error` for a style that the module does not have, and for options that cannot be parallelized.
  virtual Parallelization parallelization(const ParallelStyle& style) const = 0;

  /// Redistributes the input, of which this rank has `local`, for the computation. `last_size` is the last size of the
  /// full input. If another dimension is sharded, its size is the sum over the ranks: a collective, which throws
  /// `Error(invalid_argument)` unless the input is sharded as torch.chunk splits. If `distribute_module` distributed
  /// the module, this and `output` call its functions.
  DTensor input(const at::Tensor& local, std::optional<std::int64_t> last_size = std::nullopt) const;
  /// Returns the DTensor of a parameter, on a mesh of this process alone if the module is not parallelized. Throws
  /// `Error(invalid_argument)` for a parameter of a parallelized module that was not parallelized.
  DTensor parameter(const std::string& name, const at::Tensor& local) const;
  at::Tensor output(const DTensor& result) const;
  /// Returns forward(). If it throws, notifies the other ranks, which do not compare their calls there.
  at::Tensor in_forward(FunctionRef<at::Tensor()> forward) const;
  /// Throws `Error(unsupported)` if the module is parallelized, since `operation` would see only this rank's part.
  void check_not_parallelized(const char* operation) const;

 private:
  friend class ModulePlan;
  struct State {
    DeviceMesh mesh;
    std::map<std::string, DTensorSpec> specs;
    std::function<DTensor(const at::Tensor& local, std::optional<std::int64_t> last_size)> input;
    std::function<at::Tensor(const DTensor& result)> output;
  };
  std::optional<State> state_;
};

/// A linear layer that takes ColwiseParallel or RowwiseParallel. Cloning a parallelized module, of this type or those
/// below, throws `Error(unsupported)`.
class ParallelLinearImpl : public torch::nn::LinearImpl, public TensorParallel {
 public:
  using LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& input);
  std::shared_ptr<Module> clone(const OptionalDevice& device = {}) const override;
  void initialize(PhiloxGenerator& generator) override;

 protected:
  Parallelization parallelization(const ParallelStyle& style) const override;
};

/// An embedding that takes ColwiseParallel or RowwiseParallel. max_norm, scale_grad_by_freq and sparse are
/// `Error(unsupported)`.
class ParallelEmbeddingImpl : public torch::nn::EmbeddingImpl, public TensorParallel {
 public:
  using EmbeddingImpl::EmbeddingImpl;
  at::Tensor forward(const at::Tensor& ids);
  std::shared_ptr<Module> clone(const OptionalDevice& device = {}) const override;
  void initialize(PhiloxGenerator& generator) override;

 protected:
  Parallelization parallelization(const ParallelStyle& style) const override;
};

/// A layer norm that takes SequenceParallel.
class ParallelLayerNormImpl : public torch::nn::LayerNormImpl, public TensorParallel {
 public:
  using LayerNormImpl::LayerNormImpl;
  at::Tensor forward(const at::Tensor& input);
  std::shared_ptr<Module> clone(const OptionalDevice& device = {}) const override;
  void initialize(PhiloxGenerator& generator) override;

 protected:
  Parallelization parallelization(const ParallelStyle& style) const override;
};

/// An RMS norm, x * rsqrt(mean(x^2) + eps) * weight over the last dimensions, whose sizes are `normalized_shape`. Takes
/// SequenceParallel. LibTorch has no such module. PyTorch: torch.nn.RMSNorm.
class ParallelRMSNormImpl : public torch::nn::Cloneable<ParallelRMSNormImpl>, public TensorParallel {
 public:
  /// `eps` as for dtensor::rms_norm. Without `has_weight` there is no parameter (PyTorch: elementwise_affine).
  explicit ParallelRMSNormImpl(std::vector<std::int64_t> normalized_shape, std::optional<double> eps = std::nullopt,
                               bool has_weight = true);
  at::Tensor forward(const at::Tensor& input);
  void reset() override;  ///< registers the weight, of ones
  std::shared_ptr<Module> clone(const OptionalDevice& device = {}) const override;
  void initialize(PhiloxGenerator& generator) override;
  at::Tensor weight;

 protected:
  Parallelization parallelization(const ParallelStyle& style) const override;

 private:
  std::vector<std::int64_t> normalized_shape_;
  std::optional<double> eps_;
  bool has_weight_;
};

/// A dropout: in training, dtensor::dropout with the module's generator. It drops the same elements of the full input
/// with any plan and on any mesh. Takes SequenceParallel. PyTorch: torch.nn.Dropout, with the numbers of its own
/// generator.
class ParallelDropoutImpl : public torch::nn::Cloneable<ParallelDropoutImpl>, public TensorParallel {
 public:
  /// `generator` must be equal on all ranks. Each forward in training advances it by the elements of the full input.
  ParallelDropoutImpl(double p, PhiloxGenerator generator);
  at::Tensor forward(const at::Tensor& input);
  void reset() override;  ///< does nothing: there are no parameters
  std::shared_ptr<Module> clone(const OptionalDevice& device = {}) const override;
  PhiloxGenerator generator;

 protected:
  Parallelization parallelization(const ParallelStyle& style) const override;

 private:
  double p_;
};

TORCH_MODULE(ParallelLinear);
TORCH_MODULE(ParallelEmbedding);
TORCH_MODULE(ParallelLayerNorm);
TORCH_MODULE(ParallelRMSNorm);
TORCH_MODULE(ParallelDropout);

}  // namespace tessera
