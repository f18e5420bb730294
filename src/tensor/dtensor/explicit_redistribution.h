#pragma once
// The check of an ExplicitRedistributionContext.

#include <string_view>

#include "tessera/tensor/dtensor.h"

namespace tessera {

// Refuses the redistribution of an op's input, or of its gradient, if this thread is in an
// ExplicitRedistributionContext that does. `what` it is: "DTensor", "gradient".
void check_explicit(std::string_view what, const DeviceMesh& mesh, const MeshLayout& from, const MeshLayout& to);
// Returns whether the innermost context of this thread permits every redistribution. Their gradients are permitted too.
bool is_permitted_explicitly();

}  // namespace tessera
