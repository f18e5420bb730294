#pragma once
/// \file
/// Functions of local tensors, applied to DTensors.
///
/// The caller states how the results are placed. Collectives of the function, if any, are the caller's; `local_map`
/// itself communicates only to redistribute inputs. For an op whose placements depend on those of its inputs, use a
/// rule (tessera/tensor/dtensor_op.h). PyTorch: local_map in torch/distributed/tensor/experimental.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/tensor/dtensor.h"

namespace tessera {

struct LocalMapOptions {
  /// The placements of each result.
  std::vector<Placements> out_placements;
  /// The placements that each input must have. An empty list, or an empty member of it, permits any.
  std::vector<Placements> in_placements = {};
  /// The placements of the gradient that the function gives each input, by default `DTensor::grad_placements()`. If
  /// each rank computes a part of the result from a replicated input, its gradient is partial.
  std::vector<Placements> in_grad_placements = {};
  /// The mesh of the results; by default that of the first input. Inputs may be on several meshes.
  std::optional<DeviceMesh> device_mesh = std::nullopt;
  /// Whether to redistribute inputs with other placements than `in_placements`, rather than to refuse them. A
  /// collective of the meshes' ranks then.
  bool redistribute_inputs = false;
  /// Sizes of the full results. If not given, every rank is assumed to have shards of the same size as this rank.
  std::vector<std::vector<std::int64_t>> out_sizes = {};
};

/// Calls `f` with the local tensors of `inputs` and makes DTensors of its results. A rank outside of the mesh of the
/// results does not call `f`. Throws `Error(invalid_argument)` if a list of placements or sizes has another number of
/// members than there are inputs or results, if an input has other placements, and for a result that is undefined or
/// has another size than its placements imply. Exceptions of LibTorch in `f` are thrown as this error, too.
std::vector<DTensor> local_map(FunctionRef<std::vector<at::Tensor>(const std::vector<at::Tensor>& locals)> f,
                               std::span<const DTensor> inputs, const LocalMapOptions& options);

}  // namespace tessera
