#pragma once
/// \file
/// Tensor parallelism: layers whose parameters ranks hold together, each computing with its part.
///
///     struct MlpImpl : torch::nn::Module {
///       ParallelLinear up{64, 256}, down{256, 64};  // a torch::nn::Linear each, until it is parallelized
///       at::Tensor forward(const at::Tensor& x) { return down(at::relu(up(x))); }
///     };
///     parallelize_module(*mlp, mesh["tp"], {{"up", ColwiseParallel{}}, {"down", RowwiseParallel{}}});
///
/// Laws: a parallelized module computes what it did before on the whole tensors, up to rounding, and so do its
/// gradients. Parameters keep their identity and become local tensors; inputs and results are local tensors too, placed
/// as the style says. Between a column-wise and a row-wise layer nothing is sent.
///
/// forward and backward are collectives of the mesh's ranks. On a 2-D mesh FSDP shards what this leaves on each rank:
/// parallelize along one dimension first, then give FullyShardedDataParallel the other's group, `mesh.group("dp")`.
/// PyTorch: torch/distributed/tensor/parallel.

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/dtensor_parameters.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

/// Of a linear layer [out, in] each rank has some rows, of an embedding [rows, width] some columns; of the result
/// each has some columns.
struct ColwiseParallel {
  Placement input_layout = Placement::replicate();  ///< how the input comes; it is made whole
  Placement output_layout = Placement::shard(-1);   ///< what the result becomes
};

/// Of a linear layer each rank has some columns, of an embedding some rows; the results are added up.
struct RowwiseParallel {
  /// How the input comes: cut along its last dimension, as it is computed with, unless said. An embedding computes
  /// with whole ids. PyTorch wants that said for an embedding.
  std::optional<Placement> input_layout = std::nullopt;
  Placement output_layout = Placement::replicate();
};

/// A layer norm (also without parameters) of an input that is cut along `sequence_dim`, and so is its result. Every
/// rank has its parameters.
struct SequenceParallel {
  std::int64_t sequence_dim = 1;
};

using ParallelStyle = std::variant<ColwiseParallel, RowwiseParallel, SequenceParallel>;
/// "ColwiseParallel", ...
std::string to_string(const ParallelStyle& style);

/// Modules by their names ("layers.0.up"), of which each part may be a pattern of the shell ("layers.*.up"); "" is the
/// module itself.
using ParallelPlan = std::vector<std::pair<std::string, ParallelStyle>>;

/// Parallelizes the modules of `plan` in `module` along the mesh's one dimension. Parameters become those of the mesh's
/// first rank, cut; on meta they are cut without being sent. Gradients that there are, are dropped. On a rank outside
/// of the mesh nothing happens. A collective of the mesh.
///
/// Throws on all ranks, before anything is changed: `Error(invalid_argument)` for a mesh of several dimensions, a name
/// that no module or a module that several names have, a module that isn't one of the below or is parallelized or
/// sharded already, a style that it hasn't, a layout that is partial, and a parameter that another module has too,
/// unless that is to have the same part of it; `Error(unsupported)` as said below.
void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan);

/// What modules have that can be parallelized.
class TensorParallel : public DTensorParameters {
 public:
  bool is_parallelized() const { return state_.has_value(); }
  const DTensorSpec* dtensor_spec(const std::string& parameter) const override;

 protected:
  /// What a style means for a module.
  struct Parallelization {
    struct Parameter {
      Placement placement;
      std::vector<std::int64_t> size;
    };
    std::map<std::string, Parameter> parameters;  ///< every one that there is
    Placement input, computes_with, output;       ///< the input as it comes and as it is needed; the result
  };
  /// Throws `Error` for a style that the module hasn't, and options that it can't be parallelized with.
  virtual Parallelization parallelization(const ParallelStyle& style) const = 0;

  /// The input of which this rank has `local`, as it is needed. `last_size` is the whole one's last dimension; of
  /// another dimension that is cut the ranks' sizes are added up: a collective, which throws
  /// `Error(invalid_argument)` unless they are cut as torch.chunk cuts.
  DTensor input(const at::Tensor& local, std::optional<std::int64_t> last_size = std::nullopt) const;
  DTensor parameter(const std::string& name, const at::Tensor& local) const;
  at::Tensor output(const DTensor& result) const;
  /// Throws `Error(unsupported)` if parallelized: what is done here would be done to this rank's part.
  void check_whole(const char* what) const;

 private:
  friend class Parallelizer;
  struct State {
    DeviceMesh mesh;
    Placement input, computes_with, output;
    std::map<std::string, DTensorSpec> specs;
  };
  std::optional<State> state_;
};

/// ColwiseParallel or RowwiseParallel. A parallelized module can't be cloned, here and below: `Error(unsupported)`.
class ParallelLinearImpl : public torch::nn::LinearImpl, public TensorParallel {
 public:
  using LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& input);
  std::shared_ptr<Module> clone(const OptionalDevice& device = {}) const override;

 protected:
  Parallelization parallelization(const ParallelStyle& style) const override;
};

/// ColwiseParallel or RowwiseParallel. Not with max_norm, scale_grad_by_freq or sparse: `Error(unsupported)`.
class ParallelEmbeddingImpl : public torch::nn::EmbeddingImpl, public TensorParallel {
 public:
  using EmbeddingImpl::EmbeddingImpl;
  at::Tensor forward(const at::Tensor& ids);
  std::shared_ptr<Module> clone(const OptionalDevice& device = {}) const override;

 protected:
  Parallelization parallelization(const ParallelStyle& style) const override;
};

/// SequenceParallel.
class ParallelLayerNormImpl : public torch::nn::LayerNormImpl, public TensorParallel {
 public:
  using LayerNormImpl::LayerNormImpl;
  at::Tensor forward(const at::Tensor& input);
  std::shared_ptr<Module> clone(const OptionalDevice& device = {}) const override;

 protected:
  Parallelization parallelization(const ParallelStyle& style) const override;
};

TORCH_MODULE(ParallelLinear);
TORCH_MODULE(ParallelEmbedding);
TORCH_MODULE(ParallelLayerNorm);

}  // namespace tessera
