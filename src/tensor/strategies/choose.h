#pragma once
// The choice of a strategy for each mesh dimension (see tessera/tensor/dtensor_op.h).

#include <optional>
#include <span>
#include <vector>

#include "tessera/tensor/dtensor_op.h"

namespace tessera {

struct OpChoice {
  std::vector<Placements> inputs;   // to which they are redistributed
  std::vector<Placements> outputs;  // of the first result, and of those in OpRule::more_output_sizes
};

// Returns the cheapest way to compute an op. `rule` has been checked, and the inputs are on one mesh. Returns nullopt
// if the op is in place and no strategy leaves its first input as it is placed.
std::optional<OpChoice> choose_strategies(const OpRule& rule, std::span<const DTensor> inputs, bool is_in_place);

// Returns the placement of a result: 0 is the first.
const Placement& output_of(const OpStrategy& strategy, std::size_t result);

}  // namespace tessera
