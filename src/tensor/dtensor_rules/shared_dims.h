#pragma once
// Rules of ops that compute each place along some dimensions by itself.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tensor/dtensor_rules/rules.h"

namespace tessera::rules {

// A dimension of the result, and the dimension of each input that is sharded with it. An input without one is
// replicated. All of them have the same length.
struct SharedDim {
  std::size_t output;
  std::vector<std::optional<std::size_t>> inputs;
};

// For an op of which any of `dims` can be sharded.
OpRule shared(std::span<const DTensor> inputs, Sizes output_size, const std::vector<SharedDim>& dims);

// The kinds of partial tensors that an op needs not reduce: those of sums and averages, or any if it rearranges
// elements and computes nothing.
enum class Partials : std::uint8_t { none, linear, any };

// Adds the strategies under which the inputs `which` and the result are partial and the others replicated.
void add_partials(OpRule& rule, std::span<const DTensor> inputs, std::span<const std::size_t> which, Partials kinds);

}  // namespace tessera::rules
