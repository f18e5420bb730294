#include "tensor/dtensor_rules/shared_dims.h"

#include <algorithm>
#include <set>
#include <utility>

namespace tessera::rules {

OpRule shared(std::span<const DTensor> inputs, Sizes output_size, const std::vector<SharedDim>& dims) {
  const Placement replicated = Placement::replicate();
  OpRule rule{std::move(output_size), {{Placements(inputs.size(), replicated), replicated}}, true};
  for (const SharedDim& dim : dims) {
    const auto of_input = [&](std::size_t i) { return static_cast<std::int64_t>(*dim.inputs[i]); };
    std::set<std::int64_t> split_factors = {1};
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      for (const Placement& placement : inputs[i].placements()) {
        if (dim.inputs[i] && placement.is_shard(of_input(i))) split_factors.insert(placement.split_factor());
      }
    }
    for (const std::int64_t factor : split_factors) {
      OpStrategy strategy{Placements(inputs.size(), replicated),
                          Placement::strided_shard(static_cast<std::int64_t>(dim.output), factor)};
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        if (dim.inputs[i]) strategy.inputs[i] = Placement::strided_shard(of_input(i), factor);
      }
      rule.strategies.push_back(std::move(strategy));
    }
  }
  return rule;
}

void add_partials(OpRule& rule, std::span<const DTensor> inputs, std::span<const std::size_t> which, Partials kinds) {
  std::set<ReduceOp> ops;
  if (kinds == Partials::linear) ops = {ReduceOp::sum, ReduceOp::average};
  for (const std::size_t i : which) {
    for (const Placement& placement : inputs[i].placements()) {
      if (kinds == Partials::any && placement.is_partial()) ops.insert(placement.reduce_op());
    }
  }
  for (const ReduceOp op : ops) {
    OpStrategy strategy{Placements(inputs.size()), Placement::partial(op)};
    for (const std::size_t i : which) strategy.inputs[i] = strategy.output;
    rule.strategies.push_back(std::move(strategy));
  }
}

}  // namespace tessera::rules
