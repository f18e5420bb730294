#include "tessera/tensor/dtensor.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <numeric>
#include <ostream>
#include <sstream>
#include <utility>

#include "tensor/dtensor/differentiable.h"
#include "tensor/dtensor/explicit_redistribution.h"
#include "tensor/dtensor/local_outside.h"
#include "tensor/dtensor/mesh_exchange.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/internal/linear.h"
#include "tessera/layout/byte_ranges.h"
#include "tessera/layout/mesh_redistribution.h"
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
        dtype(dtype_in) {}

  const Sizes& size() const override { return layout.size(); }
  std::optional<TensorProperties> properties() const override {
    if (!shards) return properties_of(local);
    if (!shards->local_shards().empty()) return shards->storage_metadata().properties;
    if (!dtype) return std::nullopt;
    TensorProperties given;
    given.dtype = to_dtype(*dtype);
    return given;
  }
  const std::vector<Box>& local_chunks() const override { return boxes().chunks; }
  at::Tensor local_tensor(std::size_t i) const override { return boxes().views[i]; }
  // Returns the local tensor that the shards become under `target`. A collective of the mesh's ranks.
  at::Tensor placed_shards(const MeshLayout& target) const {
    if (mesh.has_this_rank()) return redistribute_shards(mesh, layout, target, *shards, dtype.value_or(at::kFloat));
    const std::optional<TensorProperties> known = properties();
    return local_outside(
        target.size(),
        at::TensorOptions().dtype(known ? to_scalar_type(known->dtype) : at::kFloat).device(mesh.device_type()));
  }
  // After a change of the layout or of the local tensor.
  void forget_boxes() {
    has_boxes_ = std::make_unique<std::once_flag>();
    boxes_ = {};
  }

  DeviceMesh mesh;
  MeshLayout layout;
  at::Tensor local;  // undefined if there are shards
  std::optional<LocalShardsWrapper> shards;
  std::optional<at::ScalarType> dtype;  // given for shards

 private:
  struct Boxes {
    std::vector<Box> chunks;
    std::vector<at::Tensor> views;
  };

  // Computed when they are needed: a strided shard has many, and ops do not need them.
  const Boxes& boxes() const {
    std::call_once(*has_boxes_, [this] {
      if (!mesh.has_this_rank()) return;
      if (shards) {
        for (const at::Tensor& shard : shards->local_shards()) {
          boxes_.chunks.push_back(shards->local_chunks()[boxes_.chunks.size()]);
          boxes_.views.push_back(shard);
        }
        return;
      }
      for (LocalBox& box : layout.local_boxes(*mesh.coordinate())) {
        boxes_.views.push_back(box_view(local.detach(), {box.local_offsets, box.box.sizes}));
        boxes_.chunks.push_back(std::move(box.box));
      }
    });
    return boxes_;
  }

  std::unique_ptr<std::once_flag> has_boxes_ = std::make_unique<std::once_flag>();
  mutable Boxes boxes_;
};

namespace {

Placements all_replicate(const DeviceMesh& mesh) { return Placements(static_cast<std::size_t>(mesh.ndim())); }

Placements of_gradient(Placements placements) {
  for (Placement& placement : placements) {
    if (placement.is_partial()) placement = Placement::replicate();
  }
  return placements;
}

void check_strided(std::string_view operation, const at::Tensor& tensor) {
  if (tensor.layout() == at::kStrided) return;
  std::ostringstream layout;
  layout << tensor.layout();
  fail(ErrorCode::invalid_argument, "{}: its layout is {}, expected Strided", operation, layout.str());
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
// which are not known if the local part is a LocalShardsWrapper. `add_others` adds all other arguments that decide what
// the ranks send to each other, in backward too.
MeshLayout agree_on_tensor(
    const ProcessGroup& group, std::string_view call, const at::Tensor& tensor, FunctionRef<MeshLayout()> layout_of,
    FunctionRef<void(CallArguments&)> add_others = [](CallArguments&) {}) {
  std::optional<MeshLayout> layout;
  group.check_call(call, [&](CallArguments& arguments) {
    layout = layout_of();
    arguments.add("size", shape_to_string(layout->size()))
        .add("dtype", tensor.defined() ? c10::toString(tensor.scalar_type()) : "of local shards")
        .add("device", tensor.defined() ? c10::DeviceTypeName(tensor.device().type(), true) : "of local shards")
        .add("requires_grad", tensor.defined() && tensor.requires_grad())
        .add("placements", to_string(layout->placements()));
    add_others(arguments);
  });
  return *std::move(layout);
}

}  // namespace

MeshLayout gradient_of(const MeshLayout& layout) {
  return {layout.size(), layout.mesh_shape(), of_gradient(layout.placements())};
}

namespace {

// As redistribute_local, differentiable. `dtype`: in which elements are sent, and of the result. `gradient_dtype`: in
// which the gradient is sent. `by_op`: whether an op does it, which an ExplicitRedistributionContext may refuse.
at::Tensor redistributed_in(const DeviceMesh& mesh, const MeshLayout& from, const MeshLayout& to,
                            const at::Tensor& local, at::ScalarType dtype, at::ScalarType gradient_dtype, bool by_op) {
  const at::ScalarType original = local.scalar_type();
  return comm::linear(
      local, [&](const at::Tensor& now) { return redistribute_local(mesh, from, to, now.to(dtype)); },
      [=, incoming = gradient_of(to), outgoing = gradient_of(from)](const at::Tensor& gradient) {
        if (by_op) check_explicit("gradient", mesh, incoming, outgoing);
        return redistributed_in(mesh, incoming, outgoing, gradient, gradient_dtype, dtype, by_op).to(original);
      });
}

}  // namespace

at::Tensor redistributed(const DeviceMesh& mesh, const MeshLayout& from, const MeshLayout& to,
                         const at::Tensor& local) {
  return redistributed_in(mesh, from, to, local, local.scalar_type(), local.scalar_type(), false);
}

namespace {

at::TensorOptions options_of(const at::Tensor& like) {
  return like.defined() ? like.options().requires_grad(false) : at::TensorOptions();
}

}  // namespace

DTensor DTensor::from_local(const at::Tensor& local, const DeviceMesh& mesh, Placements placements,
                            const FromLocalOptions& options) {
  if (placements.empty()) placements = all_replicate(mesh);
  const auto layout_of = [&] {
    if (!local.defined())
      fail(ErrorCode::invalid_argument, "DTensor from a local tensor: it is undefined, expected a tensor");
    check_strided("DTensor from a local tensor", local);
    const std::size_t dims = options.size ? options.size->size() : static_cast<std::size_t>(local.dim());
    const Placements from_front = normalized(placements, dims);
    MeshLayout layout(options.size ? *options.size : size_if_all_are_alike(local, mesh, from_front), mesh.shape(),
                      from_front);
    check_local(mesh, layout, local);
    if (!options.grad_placements.empty())
      static_cast<void>(MeshLayout(layout.size(), mesh.shape(), options.grad_placements));
    return layout;
  };
  if (!mesh.has_this_rank()) {
    const std::size_t dims = local.defined() ? static_cast<std::size_t>(local.dim()) : dims_for(placements);
    MeshLayout layout(options.size.value_or(Sizes(dims, 0)), mesh.shape(), placements);
    at::Tensor none = local_outside(layout.size(), options_of(local), {local});
    return DTensor(mesh, std::move(layout), std::move(none));
  }
  const auto with_gradient_placed = [&](const MeshLayout& layout, const at::Tensor& tensor) {
    if (options.grad_placements.empty()) return tensor;
    const MeshLayout given = gradient_of(layout), wanted(layout.size(), mesh.shape(), options.grad_placements);
    return comm::linear(
        tensor, [](const at::Tensor& x) { return x.view_as(x); },
        [mesh, given, wanted](const at::Tensor& gradient) {
          return tessera::redistributed(mesh, given, wanted, gradient);
        });
  };
  if (!options.run_check) {
    MeshLayout layout = layout_of();
    at::Tensor placed = with_gradient_placed(layout, local);
    return DTensor(mesh, std::move(layout), std::move(placed));
  }

  const ProcessGroup& group = mesh.group();
  MeshLayout layout = agree_on_tensor(group, "check local tensors", local, layout_of, [&](CallArguments& arguments) {
    arguments.add("placements of the gradient", tessera::to_string(options.grad_placements));
  });
  const auto broadcast_replicas = [&](const at::Tensor& mine) {
    at::Tensor same = mine.clone(at::MemoryFormat::Contiguous);
    if (same.is_meta()) return same;
    for (std::int64_t m = 0; m < mesh.ndim(); ++m) {
      if (layout.placements()[static_cast<std::size_t>(m)].is_replicate()) mesh.group(m).broadcast(same, 0);
    }
    return same;
  };
  at::Tensor same = comm::linear(with_gradient_placed(layout, local), broadcast_replicas,
                                 [](const at::Tensor& gradient) { return gradient; });
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
const std::vector<Box>& DTensor::local_chunks() const { return state_->local_chunks(); }
std::int64_t DTensor::numel() const { return volume(Box::full(size())); }
const LocalShardsWrapper* DTensor::local_shards() const { return state_->shards ? &*state_->shards : nullptr; }

at::ScalarType DTensor::scalar_type() const {
  if (const std::optional<TensorProperties> properties = state_->properties()) return to_scalar_type(properties->dtype);
  fail(ErrorCode::unsupported,
       "dtype of {}: this rank has no local shard, expected one; pass the dtype to DTensor::from_local", to_string());
}

at::Device DTensor::device() const {
  if (!state_->shards) return state_->local.device();
  return state_->shards->local_shards().empty() ? at::Device(device_mesh().device_type()) : state_->shards->device();
}

namespace {

// Returns the dimensions of a tensor in the order of its memory, from the innermost to the outermost.
std::vector<std::size_t> dims_from_innermost(const at::Tensor& tensor) {
  std::vector<std::size_t> dims(static_cast<std::size_t>(tensor.dim()));
  std::iota(dims.rbegin(), dims.rend(), std::size_t{0});
  std::stable_sort(dims.begin(), dims.end(),
                   [&](std::size_t a, std::size_t b) { return tensor.strides()[a] < tensor.strides()[b]; });
  return dims;
}

}  // namespace

Sizes DTensor::stride() const {
  const at::Tensor& local = local_tensor();
  if (!device_mesh().has_this_rank()) return row_major_strides(size());
  Sizes strides(size().size()), dense(size().size());
  bool keeps_gaps = local.numel() > 0;  // of a local tensor that is a part of a longer one, as a slice is
  std::int64_t end = 1, dense_end = 1, full = 1, part = 1;
  for (const std::size_t dim : dims_from_innermost(local)) {
    const std::int64_t length = std::max<std::int64_t>(size()[dim], 1);
    dense[dim] = dense_end;
    dense_end *= length;
    if (!keeps_gaps) continue;
    strides[dim] = local.strides()[dim] * full / part;
    keeps_gaps = strides[dim] >= end && local.strides()[dim] * full % part == 0;
    end = strides[dim] * length;
    if (length == local.sizes()[dim]) continue;
    full *= length;
    part *= local.sizes()[dim];
  }
  return keeps_gaps ? strides : dense;
}

std::int64_t DTensor::storage_offset() const {
  const at::Tensor& local = local_tensor();
  const Sizes strides = stride();
  std::int64_t rest = local.storage_offset(), offset = 0;
  const std::vector<std::size_t> dims = dims_from_innermost(local);
  for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
    const std::int64_t step = std::max<std::int64_t>(local.strides()[*dim], 1);
    offset += rest / step * strides[*dim];
    rest %= step;
  }
  return offset + rest;
}

bool DTensor::is_contiguous() const {
  const Sizes strides = stride(), row_major = row_major_strides(size());
  for (std::size_t d = 0; d < strides.size(); ++d) {
    if (strides[d] != row_major[d] && size()[d] != 1 && numel() > 0) return false;
  }
  return true;
}

bool DTensor::is_pinned() const { return local_tensor().is_pinned(); }

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
  if (requires_grad && !at::isFloatingType(scalar_type()) && !at::isComplexType(scalar_type())) {
    fail(ErrorCode::invalid_argument,
         "requires_grad_ of a DTensor of size {} of {}: expected a floating-point or complex dtype",
         shape_to_string(size()), c10::toString(scalar_type()));
  }
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
        return tessera::redistributed(mesh, given, wanted, gradient);
      });
}

DTensor DTensor::redistribute(Placements placements, bool compares_calls) const {
  RedistributeOptions options;
  options.compares_calls = compares_calls;
  return redistribute(std::move(placements), options);
}

DTensor DTensor::redistribute(Placements placements, const RedistributeOptions& options) const {
  const DeviceMesh& mesh = device_mesh();
  if (placements.empty()) placements = all_replicate(mesh);
  const auto layout_of = [&] {
    if (state_->shards && options.forward_dtype) LocalShardsWrapper::refuse("redistribute in another dtype");
    return MeshLayout(size(), mesh.shape(), placements);
  };
  const auto add_dtypes = [&](CallArguments& arguments) {
    if (state_->shards) return;
    const at::ScalarType own = state_->local.scalar_type();
    arguments.add("sent dtype", c10::toString(options.forward_dtype.value_or(own)))
        .add("sent dtype of the gradient", c10::toString(options.backward_dtype.value_or(own)));
  };
  MeshLayout target =
      options.compares_calls && mesh.has_this_rank()
          ? agree_on_tensor(mesh.group(), fmt::format("redistribute from {}", tessera::to_string(this->placements())),
                            state_->local, layout_of, add_dtypes)
          : layout_of();
  return redistributed(std::move(target), options);
}

DTensor DTensor::redistributed(MeshLayout target, const RedistributeOptions& options) const {
  const DeviceMesh& mesh = device_mesh();
  if (state_->shards) {
    if (target == layout()) return *this;
    return DTensor(mesh, target, state_->placed_shards(target));
  }
  const at::ScalarType own = state_->local.scalar_type(), dtype = options.forward_dtype.value_or(own);
  if (target == layout() && dtype == own) return *this;
  if (!mesh.has_this_rank()) return DTensor(mesh, std::move(target), state_->local.to(dtype));
  at::Tensor local = redistributed_in(mesh, layout(), target, state_->local, dtype,
                                      options.backward_dtype.value_or(own), /*by_op=*/false);
  return DTensor(mesh, std::move(target), std::move(local));
}

DTensor redistributed_by_op(const DTensor& input, Placements placements) {
  const DeviceMesh& mesh = input.device_mesh();
  if (placements.empty()) placements = all_replicate(mesh);
  MeshLayout target(input.size(), mesh.shape(), std::move(placements));
  check_explicit("DTensor", mesh, input.layout(), target);
  if (target == input.layout()) return input;
  at::Tensor local = input.local_tensor();
  if (mesh.has_this_rank()) {
    const at::ScalarType dtype = local.scalar_type();
    local = redistributed_in(mesh, input.layout(), target, local, dtype, dtype, !is_permitted_explicitly());
  }
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
  const MeshLayout full(size(), mesh.shape(), all_replicate(mesh));
  return state_->shards ? state_->placed_shards(full) : redistributed(full, {}).to_local(grad_placements);
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

void DTensor::change_in_place(MeshLayout layout, FunctionRef<void(const at::Tensor& local)> change) const {
  const at::Tensor& local = local_tensor();
  if (device_mesh().has_this_rank()) {
    change(local);
    check_local(device_mesh(), layout, local);
  } else if (layout.size().empty() != this->layout().size().empty()) {
    state_->local = local_outside(layout.size(), options_of(local));
  }
  state_->layout = std::move(layout);
  state_->forget_boxes();
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

DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements,
                          std::optional<std::int64_t> src_data_rank) {
  if (placements.empty()) placements = all_replicate(mesh);
  const auto layout_of = [&] {
    if (!tensor.defined()) fail(ErrorCode::invalid_argument, "distribute a tensor: it is undefined, expected a tensor");
    check_strided("distribute a tensor", tensor);
    if (!tensor.is_leaf()) {
      fail(ErrorCode::invalid_argument,
           "distribute a tensor: it was computed from tensors that require gradients, expected a leaf: detach it");
    }
    for (const std::int64_t length : mesh.shape()) {
      if (!src_data_rank || (*src_data_rank >= 0 && *src_data_rank < length)) continue;
      fail(ErrorCode::invalid_argument, "distribute the tensor of rank {} on {}: expected 0 to {}", *src_data_rank,
           mesh.to_string(), length - 1);
    }
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
    if (!tensor.defined()) {
      const std::size_t dims = std::max<std::size_t>(dims_for(placements), 1);
      return DTensor::from_local(tensor, mesh, placements, {Sizes(dims, 0)});
    }
    DTensor outside = DTensor::from_local(tensor.detach(), mesh, placements, {tensor.sizes().vec()});
    return outside.requires_grad_(tensor.requires_grad());
  }
  const auto distributed = [&] {
    if (!src_data_rank) {
      MeshLayout layout = layout_of();
      const MeshLayout full(layout.size(), mesh.shape(), all_replicate(mesh));
      at::Tensor local = redistribute_local(mesh, full, layout, tensor.detach());
      return std::pair(std::move(layout), local.is_alias_of(tensor) ? local.clone() : local);
    }
    MeshLayout layout =
        agree_on_tensor(mesh.group(), fmt::format("distribute a tensor of rank {}", *src_data_rank), tensor, layout_of);
    const Sizes source(mesh.shape().size(), *src_data_rank);
    at::Tensor local = distribute_from(mesh_index(mesh.shape(), source), mesh, layout, tensor);
    return std::pair(std::move(layout), std::move(local));
  };
  auto [layout, local] = distributed();
  local.set_requires_grad(tensor.requires_grad());
  return DTensor(mesh, std::move(layout), std::move(local));
}

Sizes compute_global_tensor_shape(const Sizes& local_size, const DeviceMesh& mesh, const Placements& placements) {
  if (!mesh.has_this_rank()) return local_size;
  Placements from_front;
  mesh.group().check_call("compute_global_tensor_shape", [&](CallArguments& arguments) {
    from_front = MeshLayout(local_size, mesh.shape(), placements).placements();
    arguments.add("placements", to_string(from_front)).add("dimensions", local_size.size());
  });
  Bytes mine(local_size.size() * sizeof(std::int64_t));
  if (!mine.empty()) std::memcpy(mine.data(), local_size.data(), mine.size());
  std::vector<Sizes> sizes;  // by rank of the mesh without the dimensions that are reduced
  for (const Bytes& one : mesh.group().all_gather_bytes(mine)) {
    Sizes size(local_size.size());
    if (!one.empty()) std::memcpy(size.data(), one.data(), one.size());
    sizes.push_back(std::move(size));
  }
  for (std::size_t m = from_front.size(); m-- > 0;) {
    std::vector<Sizes> joined;
    const auto ranks = static_cast<std::size_t>(mesh.shape()[m]);
    for (std::size_t first = 0; first < sizes.size(); first += ranks) {
      Sizes& full = joined.emplace_back(sizes[first]);
      for (std::size_t i = first + 1; i < first + ranks; ++i) {
        for (std::size_t d = 0; d < full.size(); ++d) {
          if (from_front[m].is_shard(static_cast<std::int64_t>(d))) {
            full[d] += sizes[i][d];
          } else if (full[d] != sizes[i][d]) {
            fail(ErrorCode::invalid_argument,
                 "full size of local tensors as {} on {}: lengths {} and {} of dimension {} along mesh dimension {}, "
                 "expected equal ones where it is not sharded",
                 to_string(from_front), mesh.to_string(), full[d], sizes[i][d], d, m);
          }
        }
      }
    }
    sizes = std::move(joined);
  }
  return sizes[0];
}

std::ostream& operator<<(std::ostream& out, const DTensor& tensor) { return out << tensor.to_string(); }

}  // namespace tessera
