#pragma once
/// \file
/// Modules whose inputs and results a parallel plan redistributes, where they enter and leave a parallel part of a
/// model.
///
///     struct BlockImpl : torch::nn::Module, PreparedModule {
///       at::Tensor forward(const at::Tensor& x) { return prepare_output(attention(prepare_input(x))); }
///     };
///     parallelize_module(*net, mesh,
///                        {{"block", PrepareModuleInput{{Placement::shard(1)}, {Placement::replicate()}}}});
///
/// Inputs and results are local tensors. PyTorch does this in hooks, which LibTorch's modules do not have.
/// PyTorch: PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput in torch/distributed/tensor/parallel.

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "tessera/layout/placement.h"
#include "tessera/tensor/device_mesh.h"

namespace tessera {

/// Layouts of several tensors; nullopt leaves a tensor as it is.
using TensorLayouts = std::vector<std::optional<Placement>>;

/// A style that redistributes the inputs from the given to the desired layouts. Both have a member for each input.
struct PrepareModuleInput {
  TensorLayouts input_layouts, desired_input_layouts;
};

/// A style that does the same for the results. If a given layout is partial, the ranks' results add up to the result.
struct PrepareModuleOutput {
  TensorLayouts output_layouts, desired_output_layouts;
};

struct PrepareModuleInputOutput {
  PrepareModuleInput input;
  PrepareModuleOutput output;
};

/// Base of the modules that take these styles; they also derive from torch::nn::Module and call `prepare_*` in forward.
class PreparedModule {
 public:
  virtual ~PreparedModule() = default;
  bool is_prepared() const { return state_.has_value(); }

 protected:
  PreparedModule() = default;
  PreparedModule(const PreparedModule&) = default;
  PreparedModule& operator=(const PreparedModule&) = default;

  /// Return the tensors as the style places them, or as they are without a style for them. Differentiable. A tensor
  /// sharded along a dimension is expected to be as torch.chunk splits it; its ranks add up their sizes. Collectives of
  /// the mesh's ranks. Throw `Error(invalid_argument)` for another number of tensors than the style has, or other
  /// sizes.
  std::vector<at::Tensor> prepare_inputs(const std::vector<at::Tensor>& inputs) const;
  std::vector<at::Tensor> prepare_outputs(const std::vector<at::Tensor>& outputs) const;
  at::Tensor prepare_input(const at::Tensor& input) const { return prepare_inputs({input})[0]; }
  at::Tensor prepare_output(const at::Tensor& output) const { return prepare_outputs({output})[0]; }

 private:
  friend class ModulePlan;
  struct State {
    DeviceMesh mesh;
    PrepareModuleInput input;
    PrepareModuleOutput output;
  };
  std::optional<State> state_;
};

}  // namespace tessera
