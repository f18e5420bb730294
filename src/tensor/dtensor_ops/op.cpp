#include "tessera/tensor/dtensor_op.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "tensor/dtensor/explicit_redistribution.h"
#include "tensor/dtensor/local_outside.h"
#include "tensor/dtensor/mesh_groups.h"
#include "tensor/dtensor_ops/calls.h"
#include "tensor/strategies/choose.h"
#include "tensor/strategies/observer.h"
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
    if (strategy.inputs.size() != inputs) {
      fail(ErrorCode::invalid_argument,
           "placement rule of {}: a strategy has placements {}, expected one for each of {} inputs", op,
           to_string(strategy.inputs), inputs);
    }
    if (!strategy.more_outputs.empty() && strategy.more_outputs.size() != rule.more_output_sizes.size()) {
      fail(ErrorCode::invalid_argument,
           "placement rule of {}: a strategy has placements {} of further results, expected one for each of {}", op,
           to_string(strategy.more_outputs), rule.more_output_sizes.size());
    }
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
  for (const DTensor& input : inputs) add_groups_of(input.device_mesh(), groups);
  return groups;
}

using Compute = FunctionRef<at::Tensor(std::span<const DTensor> inputs)>;

// What a call of an op computes.
struct Computation {
  ComputeResults compute;
  bool is_in_place = false;
  bool has_results = true;
};

at::Tensor with_divided_gradient(const at::Tensor& input, std::int64_t divisor) {
  return comm::linear(
      input, [](const at::Tensor& tensor) { return tensor.view_as(tensor); },
      [divisor](const at::Tensor& gradient) { return gradient.div(divisor); });
}

// A rank's gradient of a replicated input is a part of the gradient if the results are parts, so they must all be.
void check_gradients(const std::string& op, std::span<const DTensor> inputs, const std::vector<Placements>& outputs) {
  const bool has_gradient =
      std::any_of(inputs.begin(), inputs.end(), [](const DTensor& input) { return input.requires_grad(); });
  for (std::size_t k = 1; k < outputs.size() && has_gradient; ++k) {
    for (std::size_t m = 0; m < outputs[k].size(); ++m) {
      const Placement &first = outputs[0][m], &other = outputs[k][m];
      if (first == other || (first.is_shard() && other.is_shard())) continue;
      fail(ErrorCode::invalid_argument,
           "{}{}: an input requires grad, and its results are placed as {} and {}, expected the same or shards", op,
           described(inputs), to_string(outputs[0]), to_string(outputs[k]));
    }
  }
}

OpRule rule_for(const std::string& op, std::span<const DTensor> inputs, PlacementRuleRef rule_of,
                PlacementRuleRef own_rule) {
  OpRule rule = rule_of(inputs);
  if (own_rule) {
    OpRule own = own_rule(inputs);
    if (rule.more_output_sizes.empty()) rule.more_output_sizes = std::move(own.more_output_sizes);
    if (rule.output_dtypes.empty()) rule.output_dtypes = std::move(own.output_dtypes);
  }
  check(op, rule, inputs.size());
  return rule;
}

// Returns the input, placed as it is wanted. Along a mesh dimension of one rank, any placement is the same local
// tensor.
DTensor placed(const DTensor& input, const Placements& wanted) {
  const DeviceMesh& mesh = input.device_mesh();
  const Placements& given = input.placements();
  for (std::size_t m = 0; m < wanted.size(); ++m) {
    if (mesh.shape()[m] > 1 && !(given[m] == wanted[m])) return redistributed_by_op(input, wanted);
  }
  return given == wanted ? input : DTensor(mesh, MeshLayout(input.size(), mesh.shape(), wanted), input.local_tensor());
}

// Returns the inputs, placed as they are wanted.
std::vector<DTensor> placed_inputs(std::span<const DTensor> inputs, const std::vector<Placements>& wanted,
                                   const Placements& output) {
  const DeviceMesh& mesh = inputs[0].device_mesh();
  std::vector<DTensor> all;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const DTensor input = placed(inputs[i], wanted[i]);
    at::Tensor local = input.local_tensor();
    // Each rank uses this replicated input only for its part of the result, so gradients are reduced as the result is.
    for (std::size_t m = 0; m < output.size() && local.requires_grad(); ++m) {
      if (!wanted[i][m].is_replicate() || output[m].is_replicate()) continue;
      local = functional::sum_gradients(mesh.group(static_cast<std::int64_t>(m)), local);
      if (output[m] == Placement::partial(ReduceOp::average)) local = with_divided_gradient(local, mesh.shape()[m]);
    }
    all.push_back(local.is_same(input.local_tensor()) ? input : DTensor(mesh, input.layout(), local));
  }
  return all;
}

std::vector<DTensor> placed_call(const std::string& op, std::span<const DTensor> inputs, PlacementRuleRef own_rule,
                                 const Computation& computation) {
  check(op, inputs);
  const PlacementRule registered_rule = registered(op);
  const bool is_registered = registered_rule != nullptr;
  const PlacementRuleRef rule_of = is_registered ? PlacementRuleRef(registered_rule) : own_rule;
  if (!rule_of) {
    fail(ErrorCode::unsupported, "{}{} has no placement rule, expected one; register it with register_placement_rule",
         op, described(inputs));
  }
  const OpRule rule = rule_for(op, inputs, rule_of, is_registered ? own_rule : PlacementRuleRef(nullptr));
  const std::optional<OpChoice> choice = choose_strategies(rule, inputs, computation.is_in_place);
  if (!choice) {
    fail(ErrorCode::unsupported,
         "{}{}: in place, this would change the placements of the first tensor, expected the same; redistribute it "
         "before",
         op, described(inputs));
  }
  if (computation.is_in_place && rule.output_size != inputs[0].size()) {
    fail(ErrorCode::invalid_argument, "{}{}: in place, the result would have size {}, expected {} as the first tensor",
         op, described(inputs), shape_to_string(rule.output_size), shape_to_string(inputs[0].size()));
  }
  const DeviceMesh& mesh = inputs[0].device_mesh();
  std::vector<MeshLayout> layouts;
  for (std::size_t k = 0; k < choice->outputs.size() && computation.has_results; ++k) {
    layouts.emplace_back(k == 0 ? rule.output_size : rule.more_output_sizes[k - 1], mesh.shape(), choice->outputs[k]);
  }
  check_gradients(op, inputs, choice->outputs);
  std::vector<DTensor> results;
  results.reserve(layouts.size());
  if (!mesh.has_this_rank()) {
    for (std::size_t k = 0; k < layouts.size(); ++k) {
      const at::ScalarType dtype = k < rule.output_dtypes.size() ? rule.output_dtypes[k] : inputs[0].scalar_type();
      const at::TensorOptions like = inputs[0].local_tensor().options().requires_grad(false).dtype(dtype);
      const at::Tensor local = local_outside(layouts[k].size(), like, dtensor::locals_of(inputs));
      if (computation.is_in_place && local.requires_grad()) inputs[0].local_tensor().copy_(local);
      results.emplace_back(mesh, std::move(layouts[k]), local);
    }
    return results;
  }
  if (OpObserver* observer = op_observer())
    observer->observe({op, inputs, rule_of, rule, *choice, computation.compute, computation.is_in_place});
  const Placements output = computation.has_results ? choice->outputs[0] : Placements();
  const std::vector<at::Tensor> locals = computation.compute(placed_inputs(inputs, choice->inputs, output));
  if (locals.size() != layouts.size()) {
    fail(ErrorCode::invalid_argument, "{}{}: {} results, expected {} as its placement rule has", op, described(inputs),
         locals.size(), layouts.size());
  }
  for (std::size_t k = 0; k < locals.size(); ++k) results.emplace_back(mesh, std::move(layouts[k]), locals[k]);
  return results;
}

// Tells waiting ranks of the current exception, and throws it.
[[noreturn]] void leave(const std::string& op, std::span<const DTensor> inputs) {
  for (const ProcessGroup& group : groups_of(inputs)) {
    comm::leave_step(group, fmt::format("op '{}' on DTensors", op), std::current_exception());
  }
  rethrow_as_error(fmt::format("{}{}", op, described(inputs)));
}

std::vector<DTensor> call_and_report(const std::string& op, std::span<const DTensor> inputs, PlacementRuleRef own_rule,
                                     const Computation& computation) {
  try {
    return placed_call(op, inputs, own_rule, computation);
  } catch (...) {
    leave(op, inputs);
  }
}

auto one_result(Compute compute) {
  return [compute](std::span<const DTensor> inputs) { return std::vector<at::Tensor>{compute(inputs)}; };
}

}  // namespace

OpObserver*& op_observer() {
  thread_local OpObserver* observer = nullptr;
  return observer;
}

DTensor call(const std::string& op, std::span<const DTensor> inputs, PlacementRuleRef rule, Compute compute) {
  return call_and_report(op, inputs, rule, {one_result(compute)})[0];
}

DTensor call(const std::string& op, std::span<const DTensor> inputs, Compute compute) {
  return call(op, inputs, nullptr, compute);
}

DTensor call_in_place(const std::string& op, std::span<const DTensor> inputs, PlacementRuleRef rule, Compute compute) {
  call_and_report(op, inputs, rule, {one_result(compute), /*is_in_place=*/true});
  return inputs[0];
}

std::vector<DTensor> call_with_results(const std::string& op, std::span<const DTensor> inputs, PlacementRuleRef rule,
                                       ComputeResults compute) {
  return call_and_report(op, inputs, rule, {compute});
}

void call_without_result(const std::string& op, std::span<const DTensor> inputs, PlacementRuleRef rule,
                         FunctionRef<void(std::span<const DTensor> inputs)> compute) {
  const auto nothing = [&](std::span<const DTensor> placed) {
    compute(placed);
    return std::vector<at::Tensor>();
  };
  call_and_report(op, inputs, rule, {nothing, /*is_in_place=*/false, /*has_results=*/false});
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
