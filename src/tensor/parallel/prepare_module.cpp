#include "tessera/tensor/parallel/prepare_module.h"

#include "tensor/dtensor/mesh_groups.h"
#include "tensor/parallel/module_plan.h"
#include "tessera/base/error.h"
#include "tessera/comm/internal/step.h"

namespace tessera {

namespace {

std::vector<at::Tensor> prepared(const DeviceMesh& mesh, const std::vector<at::Tensor>& tensors,
                                 const TensorLayouts& given, const TensorLayouts& desired, const char* what) {
  return comm::in_step(groups_of(mesh), "forward of a prepared module", [&] {
    if (tensors.size() != given.size()) {
      fail(ErrorCode::invalid_argument, "{} {} of a prepared module: expected {}, one for each layout", tensors.size(),
           what, given.size());
    }
    std::vector<at::Tensor> results = tensors;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (!given[i] || *given[i] == *desired[i]) continue;
      results[i] = with_layout(tensors[i], mesh, *given[i]).redistribute({*desired[i]}, false).to_local();
    }
    return results;
  });
}

}  // namespace

std::vector<at::Tensor> PreparedModule::prepare_inputs(const std::vector<at::Tensor>& inputs) const {
  if (!state_ || state_->input.input_layouts.empty()) return inputs;
  return prepared(state_->mesh, inputs, state_->input.input_layouts, state_->input.desired_input_layouts, "inputs");
}

std::vector<at::Tensor> PreparedModule::prepare_outputs(const std::vector<at::Tensor>& outputs) const {
  if (!state_ || state_->output.output_layouts.empty()) return outputs;
  return prepared(state_->mesh, outputs, state_->output.output_layouts, state_->output.desired_output_layouts,
                  "results");
}

}  // namespace tessera
