#include "fsdp/state/values.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "fsdp/runtime/runtime.h"
#include "tessera/base/error.h"

namespace tessera::fsdp {

namespace {

bool is_offloaded(StateDictType type, const StateOptions& options) {
  return options.offload_to_cpu.value_or(type == StateDictType::full);
}

// Returns the dimension of `mesh` with this group, or nothing.
std::optional<std::int64_t> dim_of(const DeviceMesh& mesh, const ProcessGroup& group) {
  for (std::int64_t dim = 0; dim < mesh.ndim(); ++dim) {
    if (mesh.group(dim) == group) return dim;
  }
  return std::nullopt;
}

// Returns the layout on `mesh` of a parameter that FSDP has unsharded. Throws Error(invalid_argument) if the mesh lacks
// a dimension.
MeshLayout unsharded_layout(const DeviceMesh& mesh, const ShardedParam& param) {
  Placements placements(mesh.shape().size());
  if (param.spec == nullptr) return {param.size(), mesh.shape(), std::move(placements)};
  bool fits = true;
  for (std::int64_t dim = 0; dim < param.spec->mesh.ndim(); ++dim) {
    const std::optional<std::int64_t> same = dim_of(mesh, param.spec->mesh.group(dim));
    fits = fits && same;
    if (same)
      placements[static_cast<std::size_t>(*same)] = param.spec->layout.placements()[static_cast<std::size_t>(dim)];
  }
  MeshLayout layout(param.size(), mesh.shape(), std::move(placements));
  const auto boxes_of_this_rank = [](const MeshLayout& of, const DeviceMesh& on) {
    return of.local_boxes(*on.coordinate());
  };
  if (fits && boxes_of_this_rank(layout, mesh) == boxes_of_this_rank(param.spec->layout, param.spec->mesh)) {
    return layout;
  }
  fail(ErrorCode::invalid_argument,
       "the mesh is {}, expected one with the dimensions of the mesh of the tensor parallel parameter '{}', which is "
       "{}: pass the mesh that this is a part of",
       mesh.to_string(), printable(param.fqn()), param.spec->mesh.to_string());
}

// Returns this rank's rows of a parameter whose unsharded local tensor is `local`. A collective of the mesh.
DTensor rows_of(const ShardedParam& param, const at::Tensor& local, const DeviceMesh& mesh) {
  const MeshLayout unsharded = unsharded_layout(mesh, param);
  Placements placements = unsharded.placements();
  if (!param.size().empty()) {
    placements[static_cast<std::size_t>(*dim_of(mesh, param.handle->group()))] = Placement::shard(0);
  }
  return DTensor(mesh, unsharded, local).redistribute(std::move(placements), /*compares_calls=*/false);
}

// Gathers the unsharded flat parameter from pieces on all ranks. Undefined on ranks other than 0 if `rank0_only`.
at::Tensor gather_flat(const std::vector<Piece>& pieces, bool rank0_only) {
  const FlatParamHandle& handle = *pieces[0].param.handle;
  const FlatParamLayout& layout = handle.layout();
  const at::TensorOptions options = pieces[0].piece.options().device(handle.options().device).requires_grad(false);
  const at::Tensor shard = at::zeros({layout.sharded_numel()}, options);
  for (const Piece& piece : pieces) handle.piece_of(shard, piece.param.index).copy_(piece.piece);
  at::Tensor unsharded;
  if (!rank0_only || handle.group().rank() == 0) unsharded = at::empty({layout.padded_unsharded_numel()}, options);
  if (rank0_only) {
    handle.group().gather(unsharded, shard, 0);
  } else {
    handle.group().all_gather_into(unsharded, shard);
  }
  return unsharded;
}

}  // namespace

void check_mesh(const Runtime& runtime, const DeviceMesh& mesh) {
  if (!mesh.has_this_rank()) {
    fail(ErrorCode::invalid_argument, "the mesh is {} and does not have this rank, expected one with the model's ranks",
         mesh.to_string());
  }
  for (const auto& [name, param] : sharded_params(runtime)) {
    if (!dim_of(mesh, param.handle->group())) {
      fail(ErrorCode::invalid_argument,
           "the mesh is {}, expected one with a dimension whose group is the one that shards '{}', such as "
           "DeviceMesh::from_group(model.group())",
           mesh.to_string(), printable(name));
    }
    unsharded_layout(mesh, param);
  }
}

std::vector<Value> values_of(const std::vector<Piece>& pieces, StateDictType type, const StateOptions& options,
                             const ProcessGroup& group) {
  if (pieces.empty()) return {};
  const c10::NoGradGuard no_grad;
  const bool is_full = type == StateDictType::full, is_on_cpu = is_offloaded(type, options);
  std::vector<Value> values;
  if (!is_full && !options.mesh) {
    for (const Piece& piece : pieces) {
      values.emplace_back(piece.param.part(is_on_cpu ? piece.piece.cpu() : piece.piece));
    }
    return values;
  }
  const bool rank0_only = is_full && options.rank0_only;
  // Another group has its rank 0 elsewhere.
  const at::Tensor flat = gather_flat(pieces, rank0_only && pieces[0].param.handle->group() == group);
  if (!flat.defined() || (rank0_only && group.rank() != 0)) return {};
  const auto copied = [&](const at::Tensor& tensor) {
    const at::Tensor moved = is_on_cpu ? tensor.cpu() : tensor;
    return moved.is_alias_of(flat) ? moved.clone() : moved;  // does not keep the unit's other parameters alive
  };
  const std::vector<at::Tensor> locals = pieces[0].param.handle->unflatten_as(flat);
  for (const Piece& piece : pieces) {
    const at::Tensor& local = locals[piece.param.index];
    const DTensorSpec* spec = piece.param.spec;
    if (!is_full) {
      const DTensor rows = rows_of(piece.param, local, *options.mesh);
      values.emplace_back(DTensor(rows.device_mesh(), rows.layout(), copied(rows.local_tensor())));
    } else if (spec != nullptr) {
      values.emplace_back(copied(DTensor(spec->mesh, spec->layout, local).full_tensor()));
    } else {
      values.emplace_back(copied(local));
    }
  }
  return values;
}

Value value_of_unsharded(const Value& value, StateDictType type, const StateOptions& options, bool copies) {
  const bool is_full = type == StateDictType::full, is_on_cpu = is_offloaded(type, options);
  if (const auto* tensor = value.get_if<at::Tensor>()) {
    const at::Device device = is_on_cpu ? at::Device(at::kCPU) : tensor->device();
    return tensor->to(device, tensor->scalar_type(), /*non_blocking=*/false, /*copy=*/is_full && copies);
  }
  const auto* checkpointable = value.get_if<std::shared_ptr<Checkpointable>>();
  const auto dtensor = checkpointable != nullptr ? DTensor::from_checkpointable(*checkpointable) : std::nullopt;
  if (!dtensor) return value;
  if (is_full) return value_of_unsharded(dtensor->full_tensor(), type, options, copies);
  if (!is_on_cpu || dtensor->device().is_cpu()) return value;
  return DTensor(dtensor->device_mesh(), dtensor->layout(), dtensor->local_tensor().detach().cpu());
}

GatheredDTensors::GatheredDTensors(const Runtime& runtime, const ShardedParams& params)
    : params_(params), parts_(unsharded_parts(runtime)) {
  for (const auto& param : runtime.module()->named_parameters()) {
    if (param.value().defined()) model_[param.key()] = param.value();
  }
  for (const Unit* unit : runtime.units()) {
    for (const ParamInfo& info : unit->handle()->layout().params()) unit_of_[info.fqn] = unit;
    for (const SharedParamInfo& shared : unit->handle()->layout().shared_params()) unit_of_[shared.fqn] = unit;
  }
}

void GatheredDTensors::add(const std::string& name, const std::string& key, Value& value) {
  const auto* checkpointable = value.get_if<std::shared_ptr<Checkpointable>>();
  std::optional<DTensor> tensor;
  if (checkpointable != nullptr) tensor = DTensor::from_checkpointable(*checkpointable);
  const auto param = model_.find(name);
  if (!tensor || param == model_.end()) return;
  const DTensorSpec* own = parts_.find(param->second);
  if (own != nullptr && *own == DTensorSpec{tensor->device_mesh(), tensor->layout()}) return;
  found_.insert_or_assign(std::pair(name, key), Found{std::move(*tensor), &value});
}

void GatheredDTensors::describe(const Unit& unit, CallArguments& arguments) const {
  for (const auto& [name_and_key, found] : found_) {
    const auto in = unit_of_.find(name_and_key.first);
    if (in == unit_of_.end() || in->second != &unit) continue;
    arguments.add("DTensor", fmt::format("{} {}", name_and_key.first, name_and_key.second));
  }
}

void GatheredDTensors::describe(CallArguments& arguments) const {
  for (const auto& [name_and_key, found] : found_) {
    if (unit_of_.contains(name_and_key.first)) continue;
    arguments.add("DTensor", fmt::format("{} {}", name_and_key.first, name_and_key.second));
  }
}

void GatheredDTensors::gather() {
  const c10::NoGradGuard no_grad;
  for (auto& [name_and_key, found] : found_) {
    const at::Tensor full = found.tensor.full_tensor();
    const auto param = params_.find(name_and_key.first);
    if (param != params_.end() && full.sizes() == at::IntArrayRef(param->second.size())) {
      *found.value = param->second.part(piece_in(full, param->second).clone());
    } else {
      *found.value = full;
    }
  }
  found_.clear();
}

}  // namespace tessera::fsdp
