#include "tessera/state/find_object.h"

#include <optional>
#include <vector>

#include "state/local_tensor.h"
#include "tessera/base/error.h"

namespace tessera {

namespace {

[[noreturn]] void refuse_offset(const Value& value, const checkpoint::MetadataIndex& index) {
  fail(ErrorCode::invalid_argument, "find {}: found {}, expected a sharded tensor to find a shard by its offset",
       to_string(index), kind_name(value.kind()));
}

at::Tensor find_chunk(const LocalTensor& tensor, const checkpoint::MetadataIndex& index) {
  const auto& chunks = tensor.chunks;
  const auto is_it = [&](std::size_t i) { return chunks[i].first.offsets == *index.offset; };
  if (index.index && *index.index < chunks.size() && is_it(*index.index)) return chunks[*index.index].second;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    if (is_it(i)) return chunks[i].second;
  }
  if (chunks.empty()) {
    fail(ErrorCode::not_found, "find {}: this rank has no shard of the tensor, expected one at that offset",
         to_string(index));
  }
  std::string offsets;
  for (const auto& chunk : chunks) offsets += (offsets.empty() ? "" : ", ") + shape_to_string(chunk.first.offsets);
  fail(ErrorCode::not_found,
       "find {}: this rank has {} shards of the tensor, none with that offset, expected one of {}", to_string(index),
       chunks.size(), printable(offsets));
}

}  // namespace

Value find_state_dict_object(const StateDict& state, const checkpoint::MetadataIndex& index) {
  const Value* value = state.find(index.fqn);
  if (value == nullptr) {
    fail(ErrorCode::not_found, "find {}: the state dict has no such key, expected one of its {} keys", to_string(index),
         state.size());
  }
  const std::optional<LocalTensor> local = value->is_any_tensor() ? local_tensor_of(*value) : std::nullopt;
  if (!local) {
    if (index.offset) refuse_offset(*value, index);
    return *value;
  }
  if (value->is<at::Tensor>()) {
    const std::vector<std::int64_t> origin(local->shape.size(), 0);
    if (index.offset && *index.offset != origin) refuse_offset(*value, index);
    return *value;
  }
  if (index.offset) return find_chunk(*local, index);
  const bool has_one = value->is<std::shared_ptr<Checkpointable>>() && local->chunks.size() == 1;
  if (!has_one) {
    fail(ErrorCode::invalid_argument, "find {}: found a {} with {} shards on this rank, expected an offset",
         to_string(index), kind_name(value->kind()), local->chunks.size());
  }
  return local->chunks[0].second;
}

}  // namespace tessera
