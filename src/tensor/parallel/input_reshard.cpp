#include "tessera/tensor/parallel/input_reshard.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "tensor/dtensor/mesh_exchange.h"
#include "tensor/dtensor/mesh_groups.h"
#include "tessera/comm/internal/step.h"
#include "tessera/tensor/dtensor_parameters.h"

namespace tessera {

namespace {

using OnLocals = std::function<at::Tensor(const at::Tensor&)>;

// A call, for autograd's context.
struct ReshardedCall : torch::CustomClassHolder {
  ReshardedCall(OnLocals f_in, DeviceMesh mesh_in, MeshLayout placed_in, MeshLayout kept_in, bool needs_gradient_in)
      : f(std::move(f_in)),
        mesh(std::move(mesh_in)),
        placed(std::move(placed_in)),
        kept(std::move(kept_in)),
        needs_gradient(needs_gradient_in) {}
  OnLocals f;
  DeviceMesh mesh;
  MeshLayout placed, kept;
  bool needs_gradient;  // of the input
};

using CallPtr = c10::intrusive_ptr<ReshardedCall>;

// `reached` requires a gradient, so that backward reaches the parameters of the call.
struct InputResharded : torch::autograd::Function<InputResharded> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& local,
                            const at::Tensor& /*reached*/, const CallPtr& call) {
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    context->save_for_backward({redistribute_local(call->mesh, call->placed, call->kept, local)});
    return call->f(local.detach());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto call = c10::static_intrusive_pointer_cast<ReshardedCall>(context->saved_data["call"].toCapsule());
    const at::Tensor kept = context->get_saved_variables()[0];
    return comm::in_step(groups_of(call->mesh), "backward of input_reshard", [&] {
      const at::Tensor input = redistribute_local(call->mesh, call->kept, call->placed, kept.detach())
                                   .detach()
                                   .requires_grad_(call->needs_gradient);
      const c10::AutoGradMode records(true);
      const at::Tensor result = call->f(input);
      if (result.requires_grad()) torch::autograd::backward({result}, {gradients[0]});
      return torch::autograd::variable_list{input.grad(), at::Tensor(), at::Tensor()};
    });
  }
};

at::Tensor resharded(OnLocals f, const at::Tensor& local, const DeviceMesh& mesh, const MeshLayout& placed,
                     std::int64_t dim) {
  if (!c10::GradMode::is_enabled() || !mesh.has_this_rank()) return f(local);
  Placements placements(placed.placements().size(), Placement::shard(dim));
  const MeshLayout sharded(placed.size(), mesh.shape(), std::move(placements));  // checks `dim`
  const bool is_replicated = std::all_of(placed.placements().begin(), placed.placements().end(),
                                         [](const Placement& each) { return each.is_replicate(); });
  const MeshLayout kept = is_replicated ? sharded : placed;
  return InputResharded::apply(
      local, at::empty({0}).requires_grad_(),
      c10::make_intrusive<ReshardedCall>(std::move(f), mesh, placed, kept, local.requires_grad()));
}

}  // namespace

at::Tensor input_reshard(std::function<at::Tensor(const at::Tensor&)> f, const at::Tensor& x, const DeviceMesh& mesh,
                         std::int64_t dim) {
  const Placements replicated(static_cast<std::size_t>(mesh.ndim()));
  return resharded(std::move(f), x, mesh, MeshLayout(x.sizes().vec(), mesh.shape(), replicated), dim);
}

DTensor input_reshard(std::function<DTensor(const DTensor&)> f, const DTensor& x, std::int64_t dim) {
  const DeviceMesh& mesh = x.device_mesh();
  const auto of_result = std::make_shared<std::optional<DTensorSpec>>();
  const OnLocals on_locals = [f = std::move(f), mesh, layout = x.layout(), of_result](const at::Tensor& local) {
    const DTensor result = f(DTensor(mesh, layout, local));
    *of_result = {result.device_mesh(), result.layout()};
    return result.local_tensor();
  };
  at::Tensor local = resharded(on_locals, x.local_tensor(), mesh, x.layout(), dim);
  return DTensor((*of_result)->mesh, (*of_result)->layout, std::move(local));
}

}  // namespace tessera
