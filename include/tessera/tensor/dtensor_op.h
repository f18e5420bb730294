#pragma once
/// \file
/// How ops on DTensors are computed: each rank computes with its local tensors, and a rule says how these must be
/// placed for the results to be a tensor again.
///
/// A rule lists, for one mesh dimension, the placements of the inputs under which local results make the whole, and
/// how that is placed then. For each mesh dimension a call takes the way to which the inputs get at the least that must
/// be sent, the first of those in the list, and redistributes them. An op without a rule is refused by its name.
///
/// Law: `call(op, inputs, f).full_tensor()` is `f` on the whole inputs, up to rounding, and the gradients are those of
/// it: an input that all ranks have whole, for results of which each has a part, gets the sum of their gradients.
/// Functions that call are collectives of the mesh's ranks; rules are global, and registered on all ranks alike.
/// PyTorch: torch/distributed/tensor/_dispatch.py, _sharding_prop.py, _op_schema.py.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tessera/layout/placement.h"
#include "tessera/tensor/dtensor.h"

namespace tessera {

/// One way to compute along a mesh dimension: as `inputs`, one for each, the result is as `output`.
struct OpStrategy {
  Placements inputs;
  Placement output;
};

struct OpRule {
  std::vector<std::int64_t> output_size;  ///< of the whole result
  /// The first is that all are replicated, or whatever the op can always do.
  std::vector<OpStrategy> strategies;
  /// Whether inputs may be cut none of which is, where that sends less. If not, the op keeps to how its inputs are cut.
  bool may_cut = false;
};

/// What an op can do with these inputs. Throws `Error(invalid_argument)` for those that it can't take.
using PlacementRule = std::function<OpRule(std::span<const DTensor> inputs)>;

/// From now on the rule of `op`, instead of that which a call brings; null takes it back.
void register_placement_rule(const std::string& op, PlacementRule rule);

/// The result of `compute` on inputs that are placed as a rule wants them, the one that is registered for `op`, else
/// `rule`; their `local_tensor()` and `layout()` say what a rank has of them. It must be of the size that the output's
/// placements give it. On a rank outside of the mesh nothing is computed. Throws `Error(unsupported)` for an op without
/// a rule, and if the local part of an input is a LocalShardsWrapper; `Error(invalid_argument)` without inputs, and for
/// inputs of several meshes.
DTensor call(const std::string& op, std::span<const DTensor> inputs, const PlacementRule& rule,
             const std::function<at::Tensor(std::span<const DTensor> inputs)>& compute);
/// With the registered rule.
DTensor call(const std::string& op, std::span<const DTensor> inputs,
             const std::function<at::Tensor(std::span<const DTensor> inputs)>& compute);

}  // namespace tessera
