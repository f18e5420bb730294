#include "tessera/tensor/dtensor/op_calls.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "tensor/strategies/observer.h"
#include "tessera/base/function_ref.h"
#include "tessera/layout/placements.h"

namespace tessera {

namespace {

class OpRecorder : public OpObserver {
 public:
  void observe(const ObservedCall& call) override {
    calls.push_back({call.op, call.rule, call.choice.inputs, call.choice.outputs});
  }
  std::vector<OpCall> calls;
};

bool mixes_any(const MeshStrategy& strategy) {
  return std::any_of(strategy.inputs.begin(), strategy.inputs.end(), mixes_partials) ||
         std::any_of(strategy.outputs.begin(), strategy.outputs.end(), mixes_partials);
}

}  // namespace

std::vector<OpCall> record_op_calls(FunctionRef<void()> f) {
  OpRecorder recorder;
  const ObserverScope scope(&recorder);
  f();
  return std::move(recorder.calls);
}

std::vector<MeshStrategy> expand_to_mesh(const OpRule& rule, std::size_t mesh_dims) {
  if (rule.strategies.empty()) return {};
  const std::size_t inputs = rule.strategies[0].inputs.size(), results = 1 + rule.more_output_sizes.size();
  std::vector<MeshStrategy> all = {{std::vector<Placements>(inputs), std::vector<Placements>(results)}};
  for (std::size_t m = 0; m < mesh_dims; ++m) {
    std::vector<MeshStrategy> longer;
    for (const MeshStrategy& before : all) {
      for (const OpStrategy& strategy : rule.strategies) {
        if (strategy.mesh_dim && *strategy.mesh_dim != m) continue;
        MeshStrategy grown = before;
        for (std::size_t i = 0; i < inputs; ++i) grown.inputs[i].push_back(strategy.inputs[i]);
        for (std::size_t k = 0; k < results; ++k) grown.outputs[k].push_back(output_of(strategy, k));
        if (!mixes_any(grown)) longer.push_back(std::move(grown));
      }
    }
    all = std::move(longer);
  }
  return all;
}

std::string to_string(const OpStrategy& strategy) {
  std::vector<std::string> inputs, outputs = {to_string(strategy.output)};
  for (const Placement& placement : strategy.inputs) inputs.push_back(to_string(placement));
  for (const Placement& placement : strategy.more_outputs) outputs.push_back(to_string(placement));
  return fmt::format("{} -> {}", fmt::join(inputs, ", "), fmt::join(outputs, ", "));
}

}  // namespace tessera
