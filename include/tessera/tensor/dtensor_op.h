#pragma once
/// \file
/// Placement rules: how an op on DTensors is computed from local tensors.
///
/// A rule lists strategies for one mesh dimension. A strategy gives placements of the inputs under which each rank can
/// compute with its local tensors alone, and the placements of the results. A call picks a strategy for each mesh
/// dimension, so that redistributing the inputs for them costs the least in total (see
/// tessera/layout/redistribution_cost.h; the first listed on a tie), and that no tensor is partial in two kinds. It
/// then redistributes the inputs. If there are very many ways, those that cost much along a single mesh dimension are
/// left out. An op without a rule is refused by name. tessera/tensor/dtensor/op_calls.h shows what a call picked;
/// tessera/tensor/dtensor/rule_check.h finds wrong strategies of a rule.
///
/// Law: `call(op, inputs, f).full_tensor()` equals `f` on the full inputs, up to rounding, and so do the gradients: if
/// an input is replicated and each rank computes a part of the result, the input gets the sum of the ranks' gradients.
/// `call` is a collective of the mesh's ranks. Exceptions of LibTorch are thrown as `Error(invalid_argument)`. Rules
/// are global; register the same on all ranks. PyTorch: torch/distributed/tensor/_dispatch.py, _sharding_prop.py,
/// _op_schema.py.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/layout/placement.h"
#include "tessera/tensor/dtensor.h"

namespace tessera {

/// One way to compute an op along a mesh dimension: a placement for each input, and the placement of the result.
struct OpStrategy {
  Placements inputs;
  Placement output;
  std::optional<std::size_t> mesh_dim = std::nullopt;  ///< the only mesh dimension that it is for; by default all
  Placements more_outputs = {};  ///< of the results after the first; by default they are placed as the first
};

struct OpRule {
  std::vector<std::int64_t> output_size;  ///< of the full result
  /// The first one must always be possible; usually it replicates all inputs.
  std::vector<OpStrategy> strategies;
  /// If false, a strategy that shards inputs is considered only if one of them is already sharded that way. If true, it
  /// is chosen whenever it costs less.
  bool may_shard = false;
  std::vector<std::vector<std::int64_t>> more_output_sizes = {};  ///< of the results after the first
  /// Of all results, for ranks outside of the mesh; by default that of the first input.
  std::vector<at::ScalarType> output_dtypes = {};
};

/// Returns the strategies of an op for these inputs. Throws `Error(invalid_argument)` if the op cannot take them.
using PlacementRule = std::function<OpRule(std::span<const DTensor> inputs)>;
/// The same for one call, which does not store it.
using PlacementRuleRef = FunctionRef<OpRule(std::span<const DTensor> inputs)>;

/// Sets the rule of `op`, which replaces the one that a call passes; null undoes this.
void register_placement_rule(const std::string& op, PlacementRule rule);

/// Redistributes the inputs for the rule that is registered for `op`, by default `rule`, and returns the result of
/// `compute` on them. `compute` uses their `local_tensor()` and `layout()`. Its result must have the local size that
/// the output's placements imply. On a rank outside of the mesh, nothing is computed: the result has the size and the
/// dtype that the rule states, and requires grad if an input does. Throws `Error(unsupported)` if the op has no rule or
/// the local part of an input is a LocalShardsWrapper; throws `Error(invalid_argument)` without inputs, and for inputs
/// on different meshes.
DTensor call(const std::string& op, std::span<const DTensor> inputs, PlacementRuleRef rule,
             FunctionRef<at::Tensor(std::span<const DTensor> inputs)> compute);
/// As above, for a `compute` that writes the result to the first input's local tensor and returns it. The first input
/// stays as it is placed; the others are redistributed for that. Returns the first input. Throws `Error(unsupported)`
/// if no strategy leaves the first input's placements as they are, and `Error(invalid_argument)` for a result of
/// another size.
DTensor call_in_place(const std::string& op, std::span<const DTensor> inputs, PlacementRuleRef rule,
                      FunctionRef<at::Tensor(std::span<const DTensor> inputs)> compute);
/// As `call`, for an op of several results: one more than the rule has `more_output_sizes`. A registered rule without
/// these, or without `output_dtypes`, gets those of `rule`. Throws `Error(invalid_argument)` for another number of
/// results and, if an input requires grad, for a strategy whose results neither have the same placement nor are all
/// sharded.
std::vector<DTensor> call_with_results(const std::string& op, std::span<const DTensor> inputs, PlacementRuleRef rule,
                                       FunctionRef<std::vector<at::Tensor>(std::span<const DTensor> inputs)> compute);
/// As `call`, for an op without a result, such as a check. What the rule states of the result is ignored.
void call_without_result(const std::string& op, std::span<const DTensor> inputs, PlacementRuleRef rule,
                         FunctionRef<void(std::span<const DTensor> inputs)> compute);
/// As above, not in place and with the registered rule only.
DTensor call(const std::string& op, std::span<const DTensor> inputs,
             FunctionRef<at::Tensor(std::span<const DTensor> inputs)> compute);

}  // namespace tessera
