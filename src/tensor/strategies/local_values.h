#pragma once
// Local tensors for checks of strategies: their values under a placement, and whether results are placed so.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/layout/placement.h"

namespace tessera {

// Returns the placements that `full` can have on a mesh of one dimension: replicated, each shard of a dimension of 2 or
// more, then each kind of partial tensor for which its dtype has enough values.
Placements placements_to_try(const at::Tensor& full);

// Returns the local tensor of a rank. `input` is the number of the tensor among the inputs of an op: partial values
// depend on it. It has memory of its own.
at::Tensor local_value(const at::Tensor& full, const Placement& placement, std::int64_t ranks, std::int64_t rank,
                       std::size_t input);

struct Tolerance {
  double relative, absolute;
};
// Returns how the ranks' local results differ from `full` under a placement; nullopt if they do not.
std::optional<std::string> difference(const at::Tensor& full, const Placement& placement,
                                      const std::vector<at::Tensor>& locals, const Tolerance& tolerance);

}  // namespace tessera
