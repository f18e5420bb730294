#pragma once
/// \file
/// Lists of placements: reading them from text, and which partial placements one tensor may have.
///
/// Pure functions. PyTorch: parse_placement in torch/distributed/tensor/_ops/strategy_validation.py, and the check of
/// partial types in torch/distributed/tensor/_dtensor_spec.py.

#include <span>
#include <string_view>

#include "tessera/layout/placement.h"

namespace tessera {

/// Returns the placement whose `to_string` is `text`: "R", "S(0)", "_S(0, 2)", "P(sum)". Spaces around it are ignored.
/// Throws `Error(invalid_argument)` for any other text.
Placement parse_placement(std::string_view text);
/// Returns the placements of "[S(0), R]". The brackets may be left out. Throws as `parse_placement`.
Placements parse_placements(std::string_view text);

/// Returns whether there are partial placements whose reductions do not commute: of several kinds, other than sums
/// together with averages. A tensor on a mesh must not have them, since its elements would depend on the order in which
/// the mesh dimensions are reduced.
bool mixes_partials(std::span<const Placement> placements);

}  // namespace tessera
