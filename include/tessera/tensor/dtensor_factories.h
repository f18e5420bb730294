#pragma once
/// \file
/// Functions that create DTensors of given or random values. PyTorch: `zeros`, `ones`, `full`, `empty`, `rand` and
/// `randn` in torch/distributed/tensor/_api.py.
///
/// Each rank creates its local tensor, without communication; all ranks of the mesh must pass the same arguments. Empty
/// `placements` replicate. Even if placements are partial, the full tensor has the values. `options` gives dtype,
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
/// Returns a tensor of `value`. The dtype is by default that of a tensor made from `value`.
DTensor full(const std::vector<std::int64_t>& size, const at::Scalar& value, const DeviceMesh& mesh,
             Placements placements = {}, const at::TensorOptions& options = {});
/// Returns uniform numbers in [0, 1), the same tensor on any mesh. Advances the generator by the elements of the
/// tensor.
DTensor rand(const std::vector<std::int64_t>& size, const DeviceMesh& mesh, PhiloxGenerator& generator,
             Placements placements = {}, const at::TensorOptions& options = {});
/// As `rand`, with numbers that are normal with mean 0 and variance 1.
DTensor randn(const std::vector<std::int64_t>& size, const DeviceMesh& mesh, PhiloxGenerator& generator,
              Placements placements = {}, const at::TensorOptions& options = {});

// Initialize x in place, without recording gradients. Advance the generator by the elements of x. Throw
// `Error(unsupported)` if x is partial. `kaiming_uniform_` needs two dimensions or more. PyTorch: torch/nn/init.py.
DTensor uniform_(const DTensor& x, PhiloxGenerator& generator, double low = 0, double high = 1);
DTensor normal_(const DTensor& x, PhiloxGenerator& generator, double mean = 0, double std = 1);
DTensor kaiming_uniform_(const DTensor& x, PhiloxGenerator& generator, double a = 0);
/// Draws exponential numbers of mean 1 / rate, for a rate > 0.
DTensor exponential_(const DTensor& x, PhiloxGenerator& generator, double rate = 1);
/// Draws the exp of normal numbers with this mean and standard deviation > 0.
DTensor log_normal_(const DTensor& x, PhiloxGenerator& generator, double mean = 1, double std = 2);
// These take integers, too.
/// Sets each element to 1 with probability p, else to 0.
DTensor bernoulli_(const DTensor& x, PhiloxGenerator& generator, double p = 0.5);
/// Draws the number of the first success, counted from 1, of trials that succeed with probability p; 0 < p < 1.
DTensor geometric_(const DTensor& x, PhiloxGenerator& generator, double p);
/// Sets x, of two dimensions, to the identity, in place and without recording gradients. Throws `Error(unsupported)` if
/// x is partial. PyTorch: torch.nn.init.eye_.
DTensor eye_(const DTensor& x);

/// Returns 1 with the probability that each element of x gives, else 0. It has no gradient. Advances the generator by
/// the elements of x.
DTensor bernoulli(const DTensor& x, PhiloxGenerator& generator);
/// Draws `samples` categories of each row of weights x, [categories] or [rows, categories], in proportion to the
/// weights, which need not sum to 1. Returns [samples] or [rows, samples] of long, without gradient. Shards of the rows
/// stay. Advances the generator by the elements of x, with replacement by those of the result. Every rank throws
/// `Error(invalid_argument)` for a weight that is negative or not finite, and for a row with fewer weights > 0 than
/// samples, or none with replacement.
DTensor multinomial(const DTensor& x, std::int64_t samples, PhiloxGenerator& generator, bool replacement = false);

/// Returns a generator with `seed`, after the mesh's ranks compared their seeds: if they differ, every rank throws
/// `Error(invalid_argument)`. Ranks of different meshes may pass different seeds. A collective of the mesh's ranks.
/// PyTorch: manual_seed in torch/distributed/tensor/_random.py.
PhiloxGenerator manual_seed(std::uint64_t seed, const DeviceMesh& mesh);
/// Returns a generator with the seed that the mesh's first rank passes, whatever the others pass: for seeds that each
/// process chose by itself. A collective of the mesh's ranks; on a rank outside of it, the seed is that rank's own.
/// PyTorch: OffsetBasedRNGTracker in torch/distributed/tensor/_random.py, which does so at the first random op.
PhiloxGenerator generator_of_first_rank(std::uint64_t seed, const DeviceMesh& mesh);

// Create a DTensor with the size, mesh, placements, dtype and device of `like`, unless `options` gives others.
DTensor empty_like(const DTensor& like, const at::TensorOptions& options = {});
DTensor zeros_like(const DTensor& like, const at::TensorOptions& options = {});
DTensor ones_like(const DTensor& like, const at::TensorOptions& options = {});
DTensor full_like(const DTensor& like, const at::Scalar& value, const at::TensorOptions& options = {});

// Draw numbers as `rand` and `randn` do. randint_like draws integers of [low, high), as the dtype of `like`.
DTensor rand_like(const DTensor& like, PhiloxGenerator& generator, const at::TensorOptions& options = {});
DTensor randn_like(const DTensor& like, PhiloxGenerator& generator, const at::TensorOptions& options = {});
DTensor randint_like(const DTensor& like, PhiloxGenerator& generator, std::int64_t low, std::int64_t high,
                     const at::TensorOptions& options = {});

// Create a DTensor with the mesh, dtype and device of `like`, and its placements if it has the same size; else
// replicated. PyTorch: `Tensor.new_full` and so on.
DTensor new_empty(const DTensor& like, const std::vector<std::int64_t>& size, const at::TensorOptions& options = {});
DTensor new_zeros(const DTensor& like, const std::vector<std::int64_t>& size, const at::TensorOptions& options = {});
DTensor new_ones(const DTensor& like, const std::vector<std::int64_t>& size, const at::TensorOptions& options = {});
DTensor new_full(const DTensor& like, const std::vector<std::int64_t>& size, const at::Scalar& value,
                 const at::TensorOptions& options = {});
/// Returns a tensor with these strides, in elements. If `like` has this size, even shards and no partial placement, and
/// the strides are those of permuted dense dimensions, it is placed as `like`, and local tensors have their dimensions
/// in the same order. Otherwise it is replicated.
DTensor new_empty_strided(const DTensor& like, const std::vector<std::int64_t>& size,
                          const std::vector<std::int64_t>& strides, const at::TensorOptions& options = {});

}  // namespace tessera::dtensor
