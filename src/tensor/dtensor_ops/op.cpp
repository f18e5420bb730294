#include "tessera/tensor/dtensor_op.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "tensor/dtensor_ops/calls.h"
#include "tensor/torch_errors.h"
#include "tessera/base/error.h"
#include "tessera/comm/functional.h"
#include "tessera/comm/internal/linear.h"
#include "tessera/comm/internal/step.h"

namespace tessera {

namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, PlacementRule> rules;
};

Registry& registry() {
  static Registry the_registry;
  return the_registry;
}

std::string described(std::span<const DTensor> inputs) {
  std::vector<std::string> texts;
  for (const DTensor& input : inputs) texts.push_back(input.to_string());
  return fmt::format("({})", fmt::join(texts, ", "));
}

PlacementRule registered(const std::string& op) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().rules.find(op);
  return found != registry().rules.end() ? found->second : nullptr;
}

// Returns the elements that all ranks along a mesh dimension send to change a tensor's placement. Each has `held`
// elements.
double cost_of(const Placement& from, const Placement& to, double held, double ranks) {
  if (from == to || ranks == 1) return 0;
  if (from.is_replicate()) return 0;
  if (from.is_partial()) return held * (ranks - 1) * (to.is_shard() ? 1 : 2);
  if (to.is_partial()) return 0;
  return held * (ranks - 1) * (to.is_shard() ? 1 : ranks);
}

double held_by_each(const DTensor& tensor) {
  double held = static_cast<double>(tensor.numel());
  for (std::size_t m = 0; m < tensor.placements().size(); ++m) {
    if (tensor.placements()[m].is_shard()) held /= static_cast<double>(tensor.device_mesh().shape()[m]);
  }
  return held;
}

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

// Returns null if the op is in place and would move its first input.
const OpStrategy* cheapest(const OpRule& rule, std::span<const DTensor> inputs, std::size_t mesh_dim,
                           bool is_in_place) {
  const OpStrategy* best = is_in_place ? nullptr : &rule.strategies[0];
  double least = std::numeric_limits<double>::infinity();
  for (const OpStrategy& strategy : rule.strategies) {
    if (strategy.mesh_dim && *strategy.mesh_dim != mesh_dim) continue;
    if (is_in_place && !keeps_first_input(strategy, inputs, mesh_dim)) continue;
    if (!is_in_place && !rule.may_shard && only_adds_shards(strategy, inputs, mesh_dim)) continue;
    if (only_adds_partials(strategy, inputs, mesh_dim)) continue;
    double cost = 0;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const auto ranks = static_cast<double>(inputs[i].device_mesh().shape()[mesh_dim]);
      cost += cost_of(inputs[i].placements()[mesh_dim], strategy.inputs[i], held_by_each(inputs[i]), ranks);
    }
    if (cost < least) {
      best = &strategy;
      least = cost;
    }
  }
  return best;
}

void check(const std::string& op, std::span<const DTensor> inputs) {
  if (inputs.empty()) fail(ErrorCode::invalid_argument, "{}: no inputs, expected at least one DTensor", op);
  for (const DTensor& input : inputs) {
    if (input.local_shards() != nullptr) LocalShardsWrapper::refuse(op);
    if (!(input.device_mesh() == inputs[0].device_mesh())) {
      fail(ErrorCode::invalid_argument, "{}{}: the tensors are on different meshes, expected one mesh", op,
           described(inputs));
    }
  }
}

void check(const std::string& op, const OpRule& rule, std::size_t inputs) {
  for (const OpStrategy& strategy : rule.strategies) {
    if (strategy.inputs.size() == inputs) continue;
    fail(ErrorCode::invalid_argument,
         "placement rule of {}: a strategy has placements {}, expected one for each of {} inputs", op,
         to_string(strategy.inputs), inputs);
  }
  if (rule.strategies.empty())
    fail(ErrorCode::invalid_argument, "placement rule of {}: no strategy, expected at least one", op);
}

}  // namespace

void register_placement_rule(const std::string& op, PlacementRule rule) {
  const std::lock_guard lock(registry().mutex);
  if (rule) {
    registry().rules[op] = std::move(rule);
  } else {
    registry().rules.erase(op);
  }
}

namespace {

// All groups of the meshes of the inputs.
std::vector<ProcessGroup> groups_of(std::span<const DTensor> inputs) {
  std::vector<ProcessGroup> groups;
  const auto add = [&](const ProcessGroup& group) {
    if (std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
  };
  for (const DTensor& input : inputs) {
    const DeviceMesh& mesh = input.device_mesh();
    if (!mesh.has_this_rank()) continue;
    add(mesh.group());
    for (std::int64_t m = 0; m < mesh.ndim(); ++m) add(mesh.group(m));
  }
  return groups;
}

using Compute = std::function<at::Tensor(std::span<const DTensor> inputs)>;

at::Tensor with_divided_gradient(const at::Tensor& input, std::int64_t divisor) {
  return comm::linear(
      input, [](const at::Tensor& tensor) { return tensor.view_as(tensor); },
      [divisor](const at::Tensor& gradient) { return gradient.div(divisor); });
}

DTensor placed_call(const std::string& op, std::span<const DTensor> inputs, const PlacementRule& own_rule,
                    const Compute& compute, bool is_in_place) {
  check(op, inputs);
  PlacementRule rule_of = registered(op);
  if (!rule_of) rule_of = own_rule;
  if (!rule_of) {
    fail(ErrorCode::unsupported, "{}{} has no placement rule: register one with register_placement_rule", op,
         described(inputs));
  }
  const OpRule rule = rule_of(inputs);
  check(op, rule, inputs.size());
  const DeviceMesh& mesh = inputs[0].device_mesh();
  const auto mesh_dims = static_cast<std::size_t>(mesh.ndim());
  std::vector<Placements> wanted(inputs.size(), Placements(mesh_dims));
  Placements output(mesh_dims);
  for (std::size_t m = 0; m < mesh_dims; ++m) {
    const OpStrategy* strategy = cheapest(rule, inputs, m, is_in_place);
    if (strategy == nullptr) {
      fail(ErrorCode::unsupported,
           "{}{}: in place, this would change the placements of the first tensor; redistribute "
           "it before",
           op, described(inputs));
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) wanted[i][m] = strategy->inputs[i];
    output[m] = strategy->output;
  }
  if (is_in_place && rule.output_size != inputs[0].size()) {
    fail(ErrorCode::invalid_argument,
         "{}{}: in place, the result would have size {}, expected that of the first tensor", op, described(inputs),
         shape_to_string(rule.output_size));
  }
  const MeshLayout layout(rule.output_size, mesh.shape(), output);
  if (!mesh.has_this_rank()) return DTensor(mesh, layout, inputs[0].local_tensor());

  std::vector<DTensor> placed;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const DTensor input = inputs[i].redistribute(wanted[i], false);
    at::Tensor local = input.local_tensor();
    // Each rank uses this replicated input only for its part of the result, so gradients are reduced as the result is.
    for (std::size_t m = 0; m < mesh_dims && local.requires_grad(); ++m) {
      if (!wanted[i][m].is_replicate() || output[m].is_replicate()) continue;
      local = functional::sum_gradients(mesh.group(static_cast<std::int64_t>(m)), local);
      if (output[m] == Placement::partial(ReduceOp::average)) local = with_divided_gradient(local, mesh.shape()[m]);
    }
    placed.push_back(local.is_same(input.local_tensor()) ? input : DTensor(mesh, input.layout(), local));
  }
  return DTensor(mesh, layout, compute(placed));
}

// Tells waiting ranks of the current exception, and throws it.
[[noreturn]] void leave(const std::string& op, std::span<const DTensor> inputs) {
  for (const ProcessGroup& group : groups_of(inputs)) {
    comm::leave_step(group, fmt::format("op '{}' on DTensors", op), std::current_exception());
  }
  rethrow_as_error(fmt::format("{}{}", op, described(inputs)));
}

DTensor call(const std::string& op, std::span<const DTensor> inputs, const PlacementRule& own_rule,
             const Compute& compute, bool is_in_place) {
  try {
    return placed_call(op, inputs, own_rule, compute, is_in_place);
  } catch (...) {
    leave(op, inputs);
  }
}

}  // namespace

DTensor call(const std::string& op, std::span<const DTensor> inputs, const PlacementRule& rule,
             const Compute& compute) {
  return call(op, inputs, rule, compute, false);
}

DTensor call(const std::string& op, std::span<const DTensor> inputs, const Compute& compute) {
  return call(op, inputs, nullptr, compute, false);
}

DTensor call_in_place(const std::string& op, std::span<const DTensor> inputs, const PlacementRule& rule,
                      const Compute& compute) {
  call(op, inputs, rule, compute, true);
  return inputs[0];
}

namespace dtensor {

std::vector<DTensor> on_one_mesh(const char* op, std::initializer_list<AnyTensor> operands) {
  std::vector<DTensor> tensors;
  tensors.reserve(operands.size());
  for (const AnyTensor& operand : operands) {
    if (operand.dtensor() != nullptr) tensors.push_back(*operand.dtensor());
  }
  if (tensors.empty()) fail(ErrorCode::invalid_argument, "{}: only plain tensors, expected at least one DTensor", op);
  const DeviceMesh mesh = tensors[0].device_mesh();
  try {
    std::vector<DTensor> all;
    all.reserve(operands.size());
    for (const AnyTensor& operand : operands) {
      if (operand.dtensor() != nullptr) {
        all.push_back(*operand.dtensor());
      } else {
        const at::Tensor& plain = operand.plain();
        FromLocalOptions options;
        if (plain.defined()) options.size = plain.sizes().vec();
        all.push_back(DTensor::from_local(plain, mesh, {}, options));
      }
    }
    return all;
  } catch (...) {
    leave(op, tensors);
  }
}

}  // namespace dtensor

}  // namespace tessera
