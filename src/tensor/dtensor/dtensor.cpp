#include "tessera/tensor/dtensor.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>
#include <ostream>
#include <utility>

#include "tensor/dtensor/mesh_exchange.h"
#include "tessera/base/error.h"
#include "tessera/comm/internal/linear.h"
#include "tessera/layout/byte_ranges.h"
#include "tessera/tensor/internal/box_view.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

using Sizes = std::vector<std::int64_t>;

struct DTensor::State : Checkpointable {
  State(DeviceMesh mesh_in, MeshLayout layout_in, at::Tensor local_in,
        std::optional<LocalShardsWrapper> shards_in = std::nullopt,
        std::optional<at::ScalarType> dtype_in = std::nullopt)
      : mesh(std::move(mesh_in)),
        layout(std::move(layout_in)),
        local(std::move(local_in)),
        shards(std::move(shards_in)),
        dtype(dtype_in) {
    if (!mesh.has_this_rank()) return;
    if (shards) {
      for (const at::Tensor& shard : shards->local_shards()) {
        chunks.push_back(shards->local_chunks()[chunks.size()]);
        views.push_back(shard);
      }
      return;
    }
    for (LocalBox& box : layout.local_boxes(*mesh.coordinate())) {
      views.push_back(box_view(local.detach(), {box.local_offsets, box.box.sizes}));
      chunks.push_back(std::move(box.box));
    }
  }

  const Sizes& size() const override { return layout.size(); }
  std::optional<TensorProperties> properties() const override {
    if (!shards) return properties_of(local);
    if (!shards->local_shards().empty()) return shards->storage_metadata().properties;
    if (!dtype) return std::nullopt;
    TensorProperties given;
    given.dtype = to_dtype(*dtype);
    return given;
  }
  const std::vector<Box>& local_chunks() const override { return chunks; }
  at::Tensor local_tensor(std::size_t i) const override { return views[i]; }

  DeviceMesh mesh;
  MeshLayout layout;
  at::Tensor local;  // undefined if there are shards
  std::optional<LocalShardsWrapper> shards;
  std::optional<at::ScalarType> dtype;  // given for shards

  std::vector<Box> chunks;
  std::vector<at::Tensor> views;
};

namespace {

Placements all_replicate(const DeviceMesh& mesh) { return Placements(static_cast<std::size_t>(mesh.ndim())); }

Placements of_gradient(Placements placements) {
  for (Placement& placement : placements) {
    if (placement.is_partial()) placement = Placement::replicate();
  }
  return placements;
}

void check_local(const DeviceMesh& mesh, const MeshLayout& layout, const at::Tensor& local) {
  if (!mesh.has_this_rank()) return;
  const LocalShape expected = layout.local_shape(*mesh.coordinate());
  if (local.sizes() != at::IntArrayRef(expected.sizes)) {
    fail(ErrorCode::invalid_argument,
         "a DTensor of size {} as {} on {}: this rank's local tensor has size {}, expected {}",
         shape_to_string(layout.size()), to_string(layout.placements()), mesh.to_string(),
         shape_to_string(local.sizes().vec()), shape_to_string(expected.sizes));
  }
}

Sizes size_if_all_are_alike(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements) {
  Sizes size = local.sizes().vec();
  for (std::size_t m = 0; m < placements.size() && m < mesh.shape().size(); ++m) {
    if (placements[m].is_shard()) size[static_cast<std::size_t>(placements[m].dim())] *= mesh.shape()[m];
  }
  return size;
}

// Returns the layout that `layout_of` returns, after all ranks have compared theirs and the properties of the tensor,
// which are not known if the local part is a LocalShardsWrapper.
MeshLayout agree_on_tensor(const ProcessGroup& group, std::string_view call, const at::Tensor& tensor,
                           const std::function<MeshLayout()>& layout_of) {
  std::optional<MeshLayout> layout;
  group.check_call(call, [&](CallArguments& arguments) {
    layout = layout_of();
    arguments.add("size", shape_to_string(layout->size()))
        .add("dtype", tensor.defined() ? c10::toString(tensor.scalar_type()) : "of local shards")
        .add("device", tensor.defined() ? c10::DeviceTypeName(tensor.device().type(), true) : "of local shards")
        .add("requires_grad", tensor.defined() && tensor.requires_grad())
        .add("placements", to_string(layout->placements()));
  });
  return *std::move(layout);
}

at::Tensor none_of(const at::Tensor& like) {
  return at::empty({0}, like.defined() ? like.options().requires_grad(false) : at::TensorOptions());
}

}  // namespace

DTensor DTensor::from_local(const at::Tensor& local, const DeviceMesh& mesh, Placements placements,
                            const FromLocalOptions& options) {
  if (placements.empty()) placements = all_replicate(mesh);
  const auto layout_of = [&] {
    if (!local.defined())
      fail(ErrorCode::invalid_argument, "DTensor from a local tensor: it is undefined, expected a tensor");
    const std::size_t dims = options.size ? options.size->size() : static_cast<std::size_t>(local.dim());
    const Placements from_front = normalized(placements, dims);
    MeshLayout layout(options.size ? *options.size : size_if_all_are_alike(local, mesh, from_front), mesh.shape(),
                      from_front);
    check_local(mesh, layout, local);
    return layout;
  };
  if (!mesh.has_this_rank()) {
    const std::size_t dims = local.defined() ? static_cast<std::size_t>(local.dim()) : 0;
    return DTensor(mesh, MeshLayout(options.size.value_or(Sizes(dims, 0)), mesh.shape(), placements), none_of(local));
  }
  if (!options.run_check) return DTensor(mesh, layout_of(), local);

  const ProcessGroup& group = mesh.group();
  MeshLayout layout = agree_on_tensor(group, "check local tensors", local, layout_of);
  const auto broadcast_replicas = [&](const at::Tensor& mine) {
    at::Tensor same = mine.clone(at::MemoryFormat::Contiguous);
    if (same.is_meta()) return same;
    for (std::int64_t m = 0; m < mesh.ndim(); ++m) {
      if (layout.placements()[static_cast<std::size_t>(m)].is_replicate()) mesh.group(m).broadcast(same, 0);
    }
    return same;
  };
  at::Tensor same = comm::linear(local, broadcast_replicas, [](const at::Tensor& gradient) { return gradient; });
  return DTensor(mesh, std::move(layout), std::move(same));
}

DTensor DTensor::from_local(const LocalShardsWrapper& local, const DeviceMesh& mesh, Placements placements, Sizes size,
                            std::optional<at::ScalarType> dtype) {
  MeshLayout layout(std::move(size), mesh.shape(), std::move(placements));
  for (const Placement& placement : layout.placements()) {
    if (placement.is_partial())
      fail(ErrorCode::invalid_argument, "DTensor of local shards as {}: expected no partial placement",
           tessera::to_string(layout.placements()));
  }
  for (std::size_t i = 0; i < local.local_shards().size(); ++i) {
    if (is_valid(local.local_chunks()[i], layout.size())) continue;
    fail(ErrorCode::invalid_argument, "local shard {} of a DTensor of size {}: expected a shard within that size",
         tessera::to_string(local.local_chunks()[i]), shape_to_string(layout.size()));
  }
  for (const at::Tensor& shard : local.local_shards()) {
    if (!dtype || shard.scalar_type() == *dtype) continue;
    fail(ErrorCode::invalid_argument, "local shard of dtype {} of a DTensor of size {}: expected {}",
         c10::toString(shard.scalar_type()), shape_to_string(layout.size()), c10::toString(*dtype));
  }
  return DTensor(std::make_shared<State>(mesh, std::move(layout), at::Tensor(), local, dtype));
}

DTensor::DTensor(const DeviceMesh& mesh, MeshLayout layout, at::Tensor local) {
  check_local(mesh, layout, local);
  state_ = std::make_shared<State>(mesh, std::move(layout), std::move(local));
}

const DeviceMesh& DTensor::device_mesh() const { return state_->mesh; }
const MeshLayout& DTensor::layout() const { return state_->layout; }
const Placements& DTensor::placements() const { return layout().placements(); }
Placements DTensor::grad_placements() const { return of_gradient(placements()); }
const Sizes& DTensor::size() const { return layout().size(); }
const std::vector<Box>& DTensor::local_chunks() const { return state_->chunks; }
std::int64_t DTensor::numel() const { return volume(Box::full(size())); }
const LocalShardsWrapper* DTensor::local_shards() const { return state_->shards ? &*state_->shards : nullptr; }

at::ScalarType DTensor::scalar_type() const {
  if (const std::optional<TensorProperties> properties = state_->properties()) return to_scalar_type(properties->dtype);
  fail(ErrorCode::unsupported, "dtype of {}: this rank has no local shard, pass the dtype to DTensor::from_local",
       to_string());
}

at::Device DTensor::device() const {
  if (!state_->shards) return state_->local.device();
  return state_->shards->local_shards().empty() ? at::Device(device_mesh().device_type()) : state_->shards->device();
}

Sizes DTensor::stride() const {
  const at::Tensor& local = local_tensor();
  if (!device_mesh().has_this_rank()) return row_major_strides(size());
  Sizes inner(size().size());  // dimensions from the outermost to the innermost
  std::iota(inner.begin(), inner.end(), 0);
  std::stable_sort(inner.begin(), inner.end(),
                   [&](std::int64_t a, std::int64_t b) { return local.stride(a) > local.stride(b); });
  Sizes strides(size().size());
  std::int64_t stride = 1;
  for (auto dim = inner.rbegin(); dim != inner.rend(); ++dim) {
    strides[static_cast<std::size_t>(*dim)] = stride;
    stride *= std::max<std::int64_t>(size(*dim), 1);
  }
  return strides;
}

std::int64_t DTensor::size(std::int64_t dim) const {
  const std::int64_t d = dim < 0 ? dim + this->dim() : dim;
  if (d < 0 || d >= this->dim()) {
    fail(ErrorCode::invalid_argument, "dimension {} of {}: expected {} to {}", dim, to_string(), -this->dim(),
         this->dim() - 1);
  }
  return size()[static_cast<std::size_t>(d)];
}

bool DTensor::requires_grad() const {
  return state_->shards ? state_->shards->requires_grad() : state_->local.requires_grad();
}

DTensor& DTensor::requires_grad_(bool requires_grad) {
  if (state_->shards) {
    state_->shards->requires_grad_(requires_grad);
  } else {
    state_->local.set_requires_grad(requires_grad);
  }
  return *this;
}

const at::Tensor& DTensor::local_tensor() const {
  if (state_->shards) LocalShardsWrapper::refuse("to_local");
  return state_->local;
}

at::Tensor DTensor::to_local(const Placements& grad_placements) const {
  const at::Tensor& local = local_tensor();
  if (grad_placements.empty()) return local;
  const MeshLayout given(size(), device_mesh().shape(), grad_placements);
  const MeshLayout wanted(size(), device_mesh().shape(), this->grad_placements());
  if (given == wanted || !local.requires_grad() || !device_mesh().has_this_rank()) return local;
  return comm::linear(
      local, [](const at::Tensor& tensor) { return tensor.view_as(tensor); },
      [mesh = device_mesh(), given, wanted](const at::Tensor& gradient) {
        return redistribute_local(mesh, given, wanted, gradient);
      });
}

DTensor DTensor::redistribute(Placements placements, bool compares_calls) const {
  const DeviceMesh& mesh = device_mesh();
  if (placements.empty()) placements = all_replicate(mesh);
  const auto layout_of = [&] { return MeshLayout(size(), mesh.shape(), placements); };
  MeshLayout target =
      compares_calls && mesh.has_this_rank()
          ? agree_on_tensor(mesh.group(), fmt::format("redistribute from {}", tessera::to_string(this->placements())),
                            state_->local, layout_of)
          : layout_of();
  if (target == layout()) return *this;
  if (!mesh.has_this_rank()) return DTensor(mesh, std::move(target), state_->local);
  if (state_->shards) return DTensor(mesh, target, redistribute_shards(mesh, layout(), target, *state_->shards));
  const MeshLayout incoming(size(), mesh.shape(), of_gradient(target.placements()));
  const MeshLayout outgoing(size(), mesh.shape(), grad_placements());
  at::Tensor local = comm::linear(
      state_->local, [&](const at::Tensor& now) { return redistribute_local(mesh, layout(), target, now); },
      [mesh, incoming, outgoing](const at::Tensor& gradient) {
        return redistribute_local(mesh, incoming, outgoing, gradient);
      });
  return DTensor(mesh, std::move(target), std::move(local));
}

at::Tensor DTensor::full_tensor(const Placements& grad_placements) const {
  const DeviceMesh& mesh = device_mesh();
  if (mesh.has_this_rank()) {
    mesh.group().check_call("full tensor", [&](CallArguments& arguments) {
      if (!grad_placements.empty()) static_cast<void>(MeshLayout(size(), mesh.shape(), grad_placements));
      arguments.add("size", shape_to_string(size()))
          .add("dtype", state_->shards ? "of local shards" : c10::toString(state_->local.scalar_type()))
          .add("placements", tessera::to_string(placements()))
          .add("placements of the gradient", tessera::to_string(grad_placements));
    });
  }
  return redistribute({}, false).to_local(grad_placements);
}

std::optional<DTensor> DTensor::grad() const {
  if (state_->shards || !state_->local.grad().defined()) return std::nullopt;
  return DTensor(device_mesh(), MeshLayout(size(), device_mesh().shape(), grad_placements()), state_->local.grad());
}

DTensor DTensor::detach() const {
  if (!state_->shards) return DTensor(device_mesh(), layout(), state_->local.detach());
  LocalShardsWrapper shards(state_->shards->local_shards(), state_->shards->local_shards().empty()
                                                                ? std::vector<Sizes>()
                                                                : state_->shards->local_offsets());
  return DTensor(std::make_shared<State>(device_mesh(), layout(), at::Tensor(), shards.detach(), state_->dtype));
}

std::shared_ptr<Checkpointable> DTensor::checkpointable() const {
  for (const Placement& placement : placements()) {
    if (placement.is_partial()) {
      fail(ErrorCode::invalid_argument, "state of {}: expected no partial placement, redistribute the tensor first",
           to_string());
    }
  }
  return state_;
}

std::optional<DTensor> DTensor::from_checkpointable(const std::shared_ptr<Checkpointable>& tensor) {
  auto state = std::dynamic_pointer_cast<State>(tensor);
  return state ? std::optional(DTensor(std::move(state))) : std::nullopt;
}

std::string DTensor::to_string() const {
  return fmt::format("DTensor of size {} as {} on {}", shape_to_string(size()), tessera::to_string(placements()),
                     device_mesh().to_string());
}

DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements) {
  if (placements.empty()) placements = all_replicate(mesh);
  const auto layout_of = [&] {
    if (!tensor.defined()) fail(ErrorCode::invalid_argument, "distribute a tensor: it is undefined, expected a tensor");
    MeshLayout layout(tensor.sizes().vec(), mesh.shape(), placements);
    for (const Placement& placement : layout.placements()) {
      if (placement.is_partial()) {
        fail(ErrorCode::invalid_argument, "distribute a tensor as {}: expected no partial placement",
             to_string(layout.placements()));
      }
    }
    return layout;
  };
  if (!mesh.has_this_rank()) {
    return DTensor::from_local(none_of(tensor), mesh, placements, {tensor.defined() ? tensor.sizes().vec() : Sizes{0}});
  }
  const ProcessGroup& group = mesh.group();
  const MeshLayout layout = agree_on_tensor(group, "distribute a tensor", tensor, layout_of);
  at::Tensor local = distribute_from_first(mesh, layout, tensor);
  local.set_requires_grad(tensor.requires_grad());
  return DTensor(mesh, layout, std::move(local));
}

std::ostream& operator<<(std::ostream& out, const DTensor& tensor) { return out << tensor.to_string(); }

}  // namespace tessera
