#pragma once
/// \file
/// Creates DTensors of given values. PyTorch: `zeros`, `ones`, `full`, `empty`, `rand` and `randn` in
/// torch/distributed/tensor/_api.py.
///
/// Each rank creates its local tensor, without communication; all ranks of the mesh must pass the same arguments. Empty
/// `placements` replicate. The full tensor has the values also if placements are partial. `options` gives dtype,
/// requires_grad and device, by default the mesh's. Throws `Error(invalid_argument)` as MeshLayout does, and for
/// options that LibTorch refuses.

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>
#include <vector>

#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/philox_generator.h"

namespace tessera::dtensor {

DTensor empty(const std::vector<std::int64_t>& size, const DeviceMesh& mesh, Placements placements = {},
              const at::TensorOptions& options = {});
DTensor zeros(const std::vector<std::int64_t>& size, const DeviceMesh& mesh, Placements placements = {},
              const at::TensorOptions& options = {});
DTensor ones(const std::vector<std::int64_t>& size, const DeviceMesh& mesh, Placements placements = {},
             const at::TensorOptions& options = {});
/// The dtype is by default that of a tensor made from `value`.
DTensor full(const std::vector<std::int64_t>& size, const at::Scalar& value, const DeviceMesh& mesh,
             Placements placements = {}, const at::TensorOptions& options = {});
/// Uniform in [0, 1), the same tensor on any mesh. Advances the generator by the elements of the tensor.
DTensor rand(const std::vector<std::int64_t>& size, const DeviceMesh& mesh, PhiloxGenerator& generator,
             Placements placements = {}, const at::TensorOptions& options = {});
/// As `rand`, normal with mean 0 and variance 1.
DTensor randn(const std::vector<std::int64_t>& size, const DeviceMesh& mesh, PhiloxGenerator& generator,
              Placements placements = {}, const at::TensorOptions& options = {});

// Initialize x in place, without recording gradients. Advance the generator by the elements of x. Throw
// `Error(unsupported)` if x is partial. `kaiming_uniform_` needs two dimensions or more. PyTorch: torch/nn/init.py.
DTensor uniform_(const DTensor& x, PhiloxGenerator& generator, double low = 0, double high = 1);
DTensor normal_(const DTensor& x, PhiloxGenerator& generator, double mean = 0, double std = 1);
DTensor kaiming_uniform_(const DTensor& x, PhiloxGenerator& generator, double a = 0);

// With the size, mesh, placements, dtype and device of `like`.
DTensor empty_like(const DTensor& like);
DTensor zeros_like(const DTensor& like);
DTensor ones_like(const DTensor& like);
DTensor full_like(const DTensor& like, const at::Scalar& value);

}  // namespace tessera::dtensor
