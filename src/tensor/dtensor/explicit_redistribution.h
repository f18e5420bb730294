#pragma once
// Redistributions by ops, which an ExplicitRedistributionContext may refuse.

#include <string_view>

#include "tessera/tensor/dtensor.h"

namespace tessera {

// Refuses the redistribution of an op's input, or of its gradient, if this thread is in an
// ExplicitRedistributionContext that does. `what` it is: "DTensor", "gradient".
void check_explicit(std::string_view what, const DeviceMesh& mesh, const MeshLayout& from, const MeshLayout& to);
// Returns whether the innermost context of this thread permits every redistribution. Their gradients are permitted too.
bool is_permitted_explicitly();
// Returns the input of an op with other placements; empty ones replicate. Ranks do not compare their calls, since they
// follow from calls of the op. Throws as check_explicit. A collective.
DTensor redistributed_by_op(const DTensor& input, Placements placements = {});

}  // namespace tessera
