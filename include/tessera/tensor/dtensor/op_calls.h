#pragma once
/// \file
/// Records of the ops on DTensors that a program calls: the placements that each chose, and those it could choose from:
///
///     const std::vector<OpCall> calls = record_op_calls([&] { dtensor::matmul(a, b); });
///     calls[0].rule.strategies;  // along one mesh dimension
///     calls[0].inputs;           // the placements to which `a` and `b` were redistributed
///
/// For tests and debugging. PyTorch: OpStrategy in torch/distributed/tensor/_op_schema.py, and
/// expand_to_full_mesh_op_strategy in torch/distributed/tensor/_ops/utils.py.

#include <string>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/tensor/dtensor_op.h"

namespace tessera {

/// A call of an op (tessera/tensor/dtensor_op.h).
struct OpCall {
  std::string op;
  OpRule rule;                      ///< for the inputs of the call
  std::vector<Placements> inputs;   ///< the placements to which it redistributed them
  std::vector<Placements> outputs;  ///< of each result
};

/// Calls `f` and returns the calls of ops that this thread made in it, in order. A function of several ops makes
/// several. Includes a call that failed after it chose placements. If calls of this function are nested, the innermost
/// records. Throws what `f` throws.
std::vector<OpCall> record_op_calls(FunctionRef<void()> f);

/// A strategy on a mesh: placements of each input and result, one for each mesh dimension.
struct MeshStrategy {
  std::vector<Placements> inputs, outputs;
  bool operator==(const MeshStrategy&) const = default;
};
/// Returns every way to choose a strategy of the rule for each of `mesh_dims` mesh dimensions. No tensor is partial in
/// two kinds, other than sums with averages.
std::vector<MeshStrategy> expand_to_mesh(const OpRule& rule, std::size_t mesh_dims);

/// Returns "S(0), R -> S(0)".
std::string to_string(const OpStrategy& strategy);

}  // namespace tessera
