#include "tensor/strategies/choose.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "tessera/layout/placements.h"
#include "tessera/layout/redistribution_cost.h"

namespace tessera {

namespace {

// The ways to choose strategies that are tried at most.
constexpr double kMostWays = 1 << 16;

using Candidates = std::vector<const OpStrategy*>;

// Returns whether the strategy shards inputs, but no input has its sharded placement yet.
bool only_adds_shards(const OpStrategy& strategy, std::span<const DTensor> inputs, std::size_t mesh_dim) {
  bool adds = false;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!strategy.inputs[i].is_shard()) continue;
    if (inputs[i].placements()[mesh_dim] == strategy.inputs[i]) return false;
    adds = true;
  }
  return adds;
}

// Returns whether the strategy makes inputs partial and shards none, but no input is partial that way yet.
bool only_adds_partials(const OpStrategy& strategy, std::span<const DTensor> inputs, std::size_t mesh_dim) {
  bool adds = false;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (strategy.inputs[i].is_replicate()) continue;
    if (strategy.inputs[i].is_shard() || inputs[i].placements()[mesh_dim] == strategy.inputs[i]) return false;
    adds = true;
  }
  return adds;
}

// Returns whether the result can take the place of the first input.
bool keeps_first_input(const OpStrategy& strategy, std::span<const DTensor> inputs, std::size_t mesh_dim) {
  const Placement& placement = inputs[0].placements()[mesh_dim];
  return strategy.inputs[0] == placement && strategy.output == placement;
}

// Returns the strategies to choose from for a mesh dimension; none only if the op is in place.
Candidates candidates_of(const OpRule& rule, std::span<const DTensor> inputs, std::size_t mesh_dim, bool is_in_place) {
  Candidates candidates;
  for (const OpStrategy& strategy : rule.strategies) {
    if (strategy.mesh_dim && *strategy.mesh_dim != mesh_dim) continue;
    if (is_in_place && !keeps_first_input(strategy, inputs, mesh_dim)) continue;
    if (!is_in_place && !rule.may_shard && only_adds_shards(strategy, inputs, mesh_dim)) continue;
    if (!only_adds_partials(strategy, inputs, mesh_dim)) candidates.push_back(&strategy);
  }
  if (candidates.empty() && !is_in_place) candidates.push_back(&rule.strategies[0]);
  return candidates;
}

class StrategySearch {
 public:
  StrategySearch(const OpRule& rule, std::span<const DTensor> inputs)
      : inputs_(inputs), mesh_shape_(inputs[0].device_mesh().shape()), results_(1 + rule.more_output_sizes.size()) {}

  std::optional<OpChoice> run(const OpRule& rule, bool is_in_place) {
    for (std::size_t m = 0; m < mesh_shape_.size(); ++m) {
      candidates_.push_back(candidates_of(rule, inputs_, m, is_in_place));
      if (candidates_[m].empty()) return std::nullopt;
      if (mesh_shape_[m] == 1) candidates_[m] = {candidates_[m][0]};  // nothing is sent along it
    }
    if (std::optional<OpChoice> free = that_sends_nothing()) return free;
    limit_ways();
    return cheapest();
  }

 private:
  OpChoice choice_of(const std::vector<std::size_t>& picks) const {
    OpChoice choice{std::vector<Placements>(inputs_.size()), std::vector<Placements>(results_)};
    for (std::size_t m = 0; m < picks.size(); ++m) {
      const OpStrategy& strategy = *candidates_[m][picks[m]];
      for (std::size_t i = 0; i < inputs_.size(); ++i) choice.inputs[i].push_back(strategy.inputs[i]);
      for (std::size_t k = 0; k < results_; ++k) choice.outputs[k].push_back(output_of(strategy, k));
    }
    return choice;
  }

  static bool mixes(const OpChoice& choice) {
    return std::any_of(choice.inputs.begin(), choice.inputs.end(), mixes_partials) ||
           std::any_of(choice.outputs.begin(), choice.outputs.end(), mixes_partials);
  }

  double cost_of(std::size_t input, const Placements& wanted) const {
    return estimated_cost(inputs_[input].size(), mesh_shape_, inputs_[input].placements(), wanted).total();
  }

  // Returns whether changing a placement along a single mesh dimension sends nothing.
  bool is_free(std::size_t mesh_dim, const OpStrategy& strategy) const {
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      const Placement &from = inputs_[i].placements()[mesh_dim], &to = strategy.inputs[i];
      if (from == to || mesh_shape_[mesh_dim] == 1 || from.is_replicate()) continue;
      if (!from.is_shard() || !to.is_partial()) return false;
    }
    return true;
  }

  // The first such way, if it is the first free strategy of each mesh dimension: most calls need no search.
  std::optional<OpChoice> that_sends_nothing() const {
    std::vector<std::size_t> picks;
    for (std::size_t m = 0; m < candidates_.size(); ++m) {
      const auto found = std::find_if(candidates_[m].begin(), candidates_[m].end(),
                                      [&](const OpStrategy* strategy) { return is_free(m, *strategy); });
      if (found == candidates_[m].end()) return std::nullopt;
      picks.push_back(static_cast<std::size_t>(found - candidates_[m].begin()));
    }
    OpChoice choice = choice_of(picks);
    if (candidates_.size() == 1) return choice;
    if (mixes(choice)) return std::nullopt;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      if (cost_of(i, choice.inputs[i]) > 0) return std::nullopt;
    }
    return choice;
  }

  // Keeps the strategies that cost least along their mesh dimension alone, if there are too many ways.
  void limit_ways() {
    double ways = 1;
    for (const Candidates& candidates : candidates_) ways *= static_cast<double>(candidates.size());
    if (ways <= kMostWays) return;
    const auto most = static_cast<std::size_t>(std::pow(kMostWays, 1.0 / static_cast<double>(candidates_.size())));
    for (std::size_t m = 0; m < candidates_.size(); ++m) {
      std::vector<std::pair<double, std::size_t>> by_cost;
      for (std::size_t c = 0; c < candidates_[m].size(); ++c) {
        double cost = 0;
        for (std::size_t i = 0; i < inputs_.size(); ++i) {
          Placements wanted = inputs_[i].placements();
          wanted[m] = candidates_[m][c]->inputs[i];
          cost += cost_of(i, wanted);
        }
        by_cost.emplace_back(cost, c);
      }
      std::sort(by_cost.begin(), by_cost.end());
      by_cost.resize(std::min(by_cost.size(), most));
      std::sort(by_cost.begin(), by_cost.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
      Candidates kept;
      for (const auto& [cost, c] : by_cost) kept.push_back(candidates_[m][c]);
      candidates_[m] = std::move(kept);
    }
  }

  // The costs of an input by what is wanted of it, each computed once.
  struct InputCosts {
    std::vector<std::vector<std::size_t>> kinds;  // of each candidate of each mesh dimension: which placement it wants
    std::vector<std::size_t> strides;
    std::vector<double> costs;  // negative if not yet known
  };

  InputCosts costs_of(std::size_t input) const {
    InputCosts result;
    std::size_t ways = 1;
    for (const Candidates& candidates : candidates_) {
      Placements distinct;
      std::vector<std::size_t>& kinds = result.kinds.emplace_back();
      for (const OpStrategy* strategy : candidates) {
        const auto found = std::find(distinct.begin(), distinct.end(), strategy->inputs[input]);
        kinds.push_back(static_cast<std::size_t>(found - distinct.begin()));
        if (found == distinct.end()) distinct.push_back(strategy->inputs[input]);
      }
      result.strides.push_back(ways);
      ways *= distinct.size();
    }
    result.costs.assign(ways, -1);
    return result;
  }

  std::optional<OpChoice> cheapest() const {
    std::vector<InputCosts> costs;
    for (std::size_t i = 0; i < inputs_.size(); ++i) costs.push_back(costs_of(i));
    std::vector<std::size_t> picks(candidates_.size(), 0);
    std::optional<OpChoice> best;
    double least = std::numeric_limits<double>::infinity();
    for (;;) {
      double total = 0;
      for (std::size_t i = 0; i < inputs_.size() && total < least; ++i) total += cost_of(i, picks, costs[i]);
      if (total < least) {
        OpChoice choice = choice_of(picks);
        if (!mixes(choice)) {
          best = std::move(choice);
          least = total;
        }
      }
      std::size_t m = picks.size();
      while (m > 0 && ++picks[m - 1] == candidates_[m - 1].size()) picks[--m] = 0;
      if (m == 0) return best;
    }
  }

  double cost_of(std::size_t input, const std::vector<std::size_t>& picks, InputCosts& known) const {
    std::size_t place = 0;
    for (std::size_t m = 0; m < picks.size(); ++m) place += known.strides[m] * known.kinds[m][picks[m]];
    double& cost = known.costs[place];
    if (cost < 0) {
      Placements wanted;
      for (std::size_t m = 0; m < picks.size(); ++m) wanted.push_back(candidates_[m][picks[m]]->inputs[input]);
      cost = cost_of(input, wanted);
    }
    return cost;
  }

  std::span<const DTensor> inputs_;
  const std::vector<std::int64_t>& mesh_shape_;
  std::size_t results_;
  std::vector<Candidates> candidates_;
};

}  // namespace

const Placement& output_of(const OpStrategy& strategy, std::size_t result) {
  return result == 0 || strategy.more_outputs.empty() ? strategy.output : strategy.more_outputs[result - 1];
}

std::optional<OpChoice> choose_strategies(const OpRule& rule, std::span<const DTensor> inputs, bool is_in_place) {
  std::optional<OpChoice> choice = StrategySearch(rule, inputs).run(rule, is_in_place);
  if (choice || is_in_place) return choice;
  const OpStrategy& first = rule.strategies[0];
  const auto mesh_dims = static_cast<std::size_t>(inputs[0].device_mesh().ndim());
  choice.emplace();
  for (const Placement& placement : first.inputs) choice->inputs.emplace_back(mesh_dims, placement);
  for (std::size_t k = 0; k <= rule.more_output_sizes.size(); ++k)
    choice->outputs.emplace_back(mesh_dims, output_of(first, k));
  return choice;
}

}  // namespace tessera
