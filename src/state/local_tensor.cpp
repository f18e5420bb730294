#include "state/local_tensor.h"

#include <algorithm>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/state/flatten_sharded_tensors.h"
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
  local.chunks.emplace_back(std::move(box), tensor.detach());
}

}  // namespace

std::optional<LocalTensor> local_tensor_of(const Value& value) {
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

StateDict without_nested(StateDict flat, const ProcessGroup& group) {
  const auto is_nested = [](const Dict::Entry& entry) { return entry.value.is<NestedShardedTensor>(); };
  if (std::none_of(flat.begin(), flat.end(), is_nested)) return flat;
  StateDict result;
  for (const Dict::Entry& entry : flat) {
    StateDict one{entry};
    if (is_nested(entry)) one = flatten_sharded_tensors(one, group);
    for (const Dict::Entry& kept : one) result.insert_or_assign(kept.key, kept.value);
  }
  return result;
}

bool overlaps_itself(const at::Tensor& tensor) {
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) == 0) return true;
  }
  return false;
}

}  // namespace tessera
