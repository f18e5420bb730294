#pragma once
/// \file
/// A check of placement rules, for users who register their own: it computes an op from local tensors under every
/// combination of placements, and compares with the op on full tensors.
///
///     const RuleCheck check = check_placement_rules({x, weight}, [](const std::vector<DTensor>& inputs) {
///       my_op(inputs[0], inputs[1]);
///     });
///     EXPECT_TRUE(check.wrong.empty()) << to_string(check);
///
/// The combinations are those on a mesh of one dimension: each input and result is replicated, sharded along any of its
/// dimensions, or partial in any kind; strategies of the rule with strided shards are checked too. Partial inputs
/// differ from rank to rank, from element to element and from input to input, and by more than the tensor's elements
/// do, so that a wrong result is not right by chance. Floating-point inputs are tried a second time with their signs
/// changed. NaN equals NaN. Gradients are not checked.
///
/// What cannot be judged is skipped, with the reason: an op whose result is all zeros or has no elements, for which
/// every placement looks right; one that gives another result in every call; and a search for missing strategies where
/// the computation communicates. PyTorch: torch/distributed/tensor/_ops/strategy_validation.py.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/tensor/dtensor_op.h"

namespace tessera {

struct RuleCheckOptions {
  int ranks = 2;  ///< threads of this process
  /// Whether to try combinations that the rules do not list. A call of an op with so many inputs that there are more
  /// than `most_combinations` is then only checked for wrong strategies.
  bool finds_missing = true;
  std::size_t most_combinations = 4096;
  double relative_tolerance = 1e-5, absolute_tolerance = 1e-5;  ///< of results
};

struct RuleCheck {
  struct Finding {
    std::string op;
    OpStrategy strategy;
    std::string problem;  ///< of a wrong one: "the result differs by 0.7 at most"
  };
  /// Strategies that give the right result, by op: those of the rules, and with `finds_missing` all that there are,
  /// except those that replicate all inputs and shards of dimensions of length 1, of which one rank has all.
  std::vector<Finding> right;
  std::vector<Finding> wrong;  ///< strategies of the rules that give another result, or that cannot be computed
  /// Strategies that the rules lack. A strategy is not missing if a rule has one for the same inputs, or one that needs
  /// shards or partial tensors in place of replicated inputs, which sends nothing. If several results are right for the
  /// same inputs, lists one: a replicated result, else a shard, else a partial one.
  std::vector<Finding> missing;
  std::vector<std::string> skipped;  ///< "op: reason"
};

/// Checks the rules of all ops that `f` calls (with call, call_in_place, call_with_results) on `inputs`, each by
/// itself. Runs `f` on threads, which are the ranks of a mesh of one dimension, with replicated DTensors of the inputs.
/// Exceptions of `f` are thrown. Throws `Error(invalid_argument)` without inputs and for fewer than two ranks.
RuleCheck check_placement_rules(const std::vector<at::Tensor>& inputs,
                                FunctionRef<void(const std::vector<DTensor>& inputs)> f,
                                const RuleCheckOptions& options = {});

/// Returns a line for each wrong and missing strategy and what was skipped.
std::string to_string(const RuleCheck& check);

}  // namespace tessera
