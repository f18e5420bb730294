#pragma once
// The random numbers of a DTensor (see tessera/tensor/philox_generator.h).

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/layout/mesh_layout.h"
#include "tessera/tensor/philox_generator.h"

namespace tessera {

enum class Distribution : std::uint8_t {
  uniform,      // in [0, 1)
  normal,       // of mean 0 and variance 1
  exponential,  // of mean 1; greater than 0
};

// Returns the binary digits of the numbers of a dtype; 64 of integers.
int digits_of(at::ScalarType dtype);

// Returns a rank's local tensor under `layout`, which has no partial placement: the numbers of its elements. Throws
// Error(invalid_argument) for a dtype that is not a floating-point one. Does not advance the generator.
at::Tensor random_local(const MeshLayout& layout, const std::vector<std::int64_t>& coordinate,
                        const at::TensorOptions& options, const PhiloxGenerator& from, Distribution distribution);

// Advances the generator by as many elements.
void advance(PhiloxGenerator& generator, std::int64_t elements);

}  // namespace tessera
