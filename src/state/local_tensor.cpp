#include "state/local_tensor.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <sstream>

#include "state/map_tensors.h"
#include "tessera/base/error.h"
#include "tessera/state/traverse.h"
#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

namespace {

void add_chunk(LocalTensor& local, Box box, const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided) {
    std::ostringstream layout;
    layout << tensor.layout();
    fail(ErrorCode::unsupported, "the tensor has layout {}, expected torch.strided", layout.str());
  }
  if (tensor.sizes() != at::IntArrayRef(box.sizes)) {
    fail(ErrorCode::invalid_argument, "the local tensor has shape {}, expected that of {}",
         shape_to_string(tensor.sizes().vec()), to_string(box));
  }
  local.chunks.emplace_back(std::move(box), tensor);
}

// Whether this rank's part of a tensor of any kind is on meta.
bool is_on_meta(const Value& value) {
  if (const auto* tensor = value.get_if<at::Tensor>()) return tensor->is_meta();
  if (const auto* sharded = value.get_if<ShardedTensor>()) {
    return !sharded->local_shards().empty() && sharded->local_shards()[0].tensor.is_meta();
  }
  const auto* own = value.get_if<std::shared_ptr<Checkpointable>>();
  if (own == nullptr) return false;
  // The local tensor may be on meta even if it has no elements, and so no chunks.
  const std::optional<DTensor> dtensor = DTensor::from_checkpointable(*own);
  if (dtensor && !dtensor->local_shards()) return dtensor->local_tensor().is_meta();
  return !(*own)->local_chunks().empty() && (*own)->local_tensor(0).is_meta();
}

}  // namespace

std::optional<LocalTensor> local_tensor_of(const Value& value) {
  std::optional<LocalTensor> local = attached_tensor_of(value);
  if (!local) return local;
  for (auto& [box, tensor] : local->chunks) tensor = tensor.detach();
  return local;
}

std::optional<LocalTensor> attached_tensor_of(const Value& value) {
  LocalTensor local;
  if (const auto* tensor = value.get_if<at::Tensor>()) {
    local.properties = properties_of(*tensor);
    local.shape = tensor->sizes().vec();
    add_chunk(local, Box::full(local.shape), *tensor);
  } else if (const auto* sharded = value.get_if<ShardedTensor>()) {
    local.properties = sharded->metadata().tensor_properties;
    local.shape = sharded->size();
    for (const Shard& shard : sharded->local_shards()) add_chunk(local, Box(shard.metadata.box()), shard.tensor);
  } else if (const auto* own = value.get_if<std::shared_ptr<Checkpointable>>()) {
    local.properties = (*own)->properties();
    local.shape = (*own)->size();
    for (std::size_t i = 0; i < (*own)->local_chunks().size(); ++i) {
      add_chunk(local, (*own)->local_chunks()[i], (*own)->local_tensor(i));
    }
  } else if (value.is<NestedShardedTensor>()) {
    fail(ErrorCode::unsupported, "found a nested sharded tensor, expected a plain one; set flatten_sharded_tensors");
  } else {
    return std::nullopt;
  }
  return local;
}

std::optional<StateDict> with_memory(const StateDict& state) {
  bool has_meta = false;
  for_each_tensor(state, [&](const Path& path, const Value& value) {
    if (!is_on_meta(value)) return;
    has_meta = true;
    const auto* own = value.get_if<std::shared_ptr<Checkpointable>>();
    const auto dtensor = own != nullptr ? DTensor::from_checkpointable(*own) : std::nullopt;
    if (value.is<at::Tensor>() || (dtensor && !dtensor->local_shards())) return;
    fail(ErrorCode::unsupported, "load '{}': the {} is on meta, expected one with memory", printable(flat_name(path)),
         kind_name(value.kind()));
  });
  if (!has_meta) return std::nullopt;
  return map_tensors(state, [](const Value& value) -> Value {
    if (!is_on_meta(value)) return value;
    const auto made = [](const at::Tensor& meta, at::Device device) {
      return at::empty_like(meta, meta.options().device(device).requires_grad(false));
    };
    if (const auto* tensor = value.get_if<at::Tensor>()) return made(*tensor, at::kCPU);
    const DTensor tensor = *DTensor::from_checkpointable(value.get<std::shared_ptr<Checkpointable>>());
    const DeviceMesh& mesh = tensor.device_mesh();
    return DTensor(mesh, tensor.layout(), made(tensor.local_tensor(), at::Device(mesh.device_type())));
  });
}

void require_memory(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  // A sparse tensor has its memory in other tensors.
  if (!tensor.is_meta() && (tensor.layout() != at::kStrided || tensor.has_storage())) return;
  fail(ErrorCode::unsupported, "found {} on {}, expected a tensor with memory", to_string(Value(tensor)),
       tensor.device().str());
}

bool overlaps_itself(const at::Tensor& tensor) {
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) == 0) return true;
  }
  return false;
}

}  // namespace tessera
