#pragma once
/// \file
/// Distribution of a module over a mesh, with placements that functions return.
///
///     const auto partition = [](const std::string&, const std::string& parameter, const at::Tensor&) {
///       return Placements{parameter == "weight" ? Placement::shard(0) : Placement::replicate()};
///     };
///     distribute_module(*net, mesh, {.partition = partition});
///
/// `parallelize_module` (tessera/tensor/tensor_parallel.h) has styles for the usual cases, on meshes of one dimension;
/// this places parameters on meshes of any number of dimensions, in any way. The module then computes the same as
/// before, whatever the placements: ops redistribute what they need. PyTorch: distribute_module in
/// torch/distributed/tensor.

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "tessera/tensor/dtensor.h"

namespace tessera {

struct DistributeModuleOptions {
  /// Returns the placements of a parameter of the submodule `module` (of names as in named_modules, "" for the module
  /// itself); empty ones replicate it. If not set, all parameters are replicated.
  std::function<Placements(const std::string& module, const std::string& parameter, const at::Tensor& full)> partition =
      {};
  /// Returns the input of a parallel layer as a DTensor on `mesh`, given what its forward gets. If not set, each rank
  /// passes the full input.
  std::function<DTensor(const std::string& module, const at::Tensor& input, const DeviceMesh& mesh)> input = {};
  /// Returns what the forward of a parallel layer returns, given its result. If not set, the full result.
  std::function<at::Tensor(const std::string& module, const DTensor& result)> output = {};
  /// As for distribute_tensor.
  std::optional<std::int64_t> src_data_rank = 0;
};

/// Distributes the parameters of `module` and its submodules over `mesh`, and replicates their buffers. Parameters that
/// are sharded must be those of parallel layers (ParallelLinear, ..., or a custom TensorParallel), which compute with
/// DTensors from then on; their inputs and results are converted by `input` and `output`. Those of other modules are
/// replicated and computed with as before. Parameters keep their identity and become local tensors; those on meta stay
/// there. Existing gradients are dropped. Does nothing on a rank outside of the mesh. A collective of the mesh's ranks.
///
/// Every rank throws before anything changes: `Error(invalid_argument)` for placements that do not fit, partial
/// placements, a parameter of another module that is not replicated, a layer that is already parallelized, a parameter
/// that is already the local tensor of a DTensor (see DTensorParameters), and a parameter that is shared by modules in
/// which it has different placements; and whatever `partition` throws.
void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh, const DistributeModuleOptions& options = {});

}  // namespace tessera
