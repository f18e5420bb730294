#include "tessera/tensor/dtensor/pending_dtensor.h"

#include <functional>
#include <optional>
#include <utility>

#include "tensor/dtensor/differentiable.h"
#include "tensor/dtensor/mesh_exchange.h"
#include "tessera/comm/internal/linear.h"
#include "tessera/layout/box.h"

namespace tessera {

struct PendingDTensor::State {
  DTensor from;
  MeshLayout to;
  std::function<at::Tensor()> finish;
  std::optional<DTensor> result;
};

bool PendingDTensor::is_complete() const { return state_->result.has_value(); }
const DeviceMesh& PendingDTensor::device_mesh() const { return state_->from.device_mesh(); }
const MeshLayout& PendingDTensor::layout() const { return state_->to; }

DTensor PendingDTensor::wait() const {
  State& state = *state_;
  if (state.result) return *state.result;
  const DeviceMesh& mesh = state.from.device_mesh();
  const MeshLayout incoming = gradient_of(state.to), outgoing = gradient_of(state.from.layout());
  at::Tensor local = comm::linear(
      state.from.local_tensor(), [&](const at::Tensor&) { return state.finish(); },
      [mesh, incoming, outgoing](const at::Tensor& gradient) {
        return redistributed(mesh, incoming, outgoing, gradient);
      });
  state.result = DTensor(mesh, state.to, std::move(local));
  state.finish = {};
  return *state.result;
}

PendingDTensor start_redistribute(const DTensor& x, Placements placements) {
  const DeviceMesh& mesh = x.device_mesh();
  if (placements.empty()) placements.resize(static_cast<std::size_t>(mesh.ndim()));
  std::optional<MeshLayout> target;
  const auto check = [&] {
    const at::Tensor& local = x.local_tensor();  // throws for local shards
    target.emplace(x.size(), mesh.shape(), placements);
    return local;
  };
  if (!mesh.has_this_rank()) {
    check();
    auto outside = std::make_shared<PendingDTensor::State>(PendingDTensor::State{x, *target, {}, {}});
    outside->result = DTensor(mesh, *target, x.local_tensor());
    return PendingDTensor(std::move(outside));
  }
  mesh.group().check_call("start_redistribute", [&](CallArguments& arguments) {
    const at::Tensor local = check();
    arguments.add("size", shape_to_string(x.size()))
        .add("dtype", c10::toString(local.scalar_type()))
        .add("device", c10::DeviceTypeName(local.device().type(), true))
        .add("requires_grad", local.requires_grad())
        .add("from placements", to_string(x.placements()))
        .add("placements", to_string(target->placements()));
  });
  auto state = std::make_shared<PendingDTensor::State>(PendingDTensor::State{x, *target, {}, {}});
  if (*target == x.layout()) {
    state->result = x;
  } else {
    state->finish = start_redistribute_local(mesh, x.layout(), *target, x.local_tensor());
  }
  return PendingDTensor(std::move(state));
}

}  // namespace tessera
