#pragma once
// The check of an ExplicitRedistributionContext.

#include "tessera/tensor/dtensor.h"

namespace tessera {

// Refuses the redistribution of an op's input if this thread is in an ExplicitRedistributionContext that does.
void check_explicit(const DTensor& from, const MeshLayout& to);

}  // namespace tessera
