// Equality of values.

#include <ATen/ATen.h>

#include <bit>
#include <cstring>

#include "tessera/state/value.h"

namespace tessera {

namespace {

// Returns the elements contiguously in CPU memory.
at::Tensor plain(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().to(at::kCPU).contiguous();
}

bool same_shards(const ShardedTensor& a, const ShardedTensor& b) {
  if (a.is_same(b)) return true;
  if (a.metadata() != b.metadata() || a.local_shards().size() != b.local_shards().size()) return false;
  for (std::size_t i = 0; i < a.local_shards().size(); ++i) {
    if (a.local_shards()[i].metadata != b.local_shards()[i].metadata) return false;
    if (!same_bits(a.local_shards()[i].tensor, b.local_shards()[i].tensor)) return false;
  }
  return true;
}

bool same_shards(const NestedShardedTensor& a, const NestedShardedTensor& b) {
  if (a.metadata != b.metadata || a.local_shards.size() != b.local_shards.size()) return false;
  for (std::size_t i = 0; i < a.local_shards.size(); ++i) {
    if (a.local_shards[i].metadata != b.local_shards[i].metadata) return false;
    if (!same_shards(a.local_shards[i].tensor, b.local_shards[i].tensor)) return false;
  }
  return true;
}

bool same_object(const OpaqueObject& a, const OpaqueObject& b) {
  if (&a == &b) return true;
  if (!pickle::equal(a.value, b.value) || a.storages.size() != b.storages.size()) return false;
  for (const auto& [key, bytes] : a.storages) {
    const auto other = b.storages.find(key);
    if (other == b.storages.end() || *other->second != *bytes) return false;
  }
  return true;
}

}  // namespace

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_same(b)) return true;
  if (a.scalar_type() != b.scalar_type() || a.layout() != at::kStrided || b.layout() != at::kStrided ||
      a.is_quantized() || b.is_quantized() || a.sizes() != b.sizes()) {
    return false;
  }
  const at::Tensor left = plain(a), right = plain(b);
  const std::size_t length_bytes = static_cast<std::size_t>(left.numel()) * left.element_size();
  return length_bytes == 0 || std::memcmp(left.data_ptr(), right.data_ptr(), length_bytes) == 0;
}

bool Value::operator==(const Value& other) const {
  if (kind() != other.kind()) return false;
  switch (kind()) {
    case ValueKind::none:
      return true;
    case ValueKind::boolean:
      return get<bool>() == other.get<bool>();
    case ValueKind::integer:
      return get<std::int64_t>() == other.get<std::int64_t>();
    case ValueKind::floating:
      return std::bit_cast<std::uint64_t>(get<double>()) == std::bit_cast<std::uint64_t>(other.get<double>());
    case ValueKind::string:
      return get<std::string>() == other.get<std::string>();
    case ValueKind::bytes:
      return get<Bytes>() == other.get<Bytes>();
    case ValueKind::list:
      return get<List>() == other.get<List>();
    case ValueKind::tuple:
      return get<Tuple>() == other.get<Tuple>();
    case ValueKind::dict:
      return get<Dict>() == other.get<Dict>();
    case ValueKind::tensor:
      return same_bits(get<at::Tensor>(), other.get<at::Tensor>());
    case ValueKind::sharded_tensor:
      return same_shards(get<ShardedTensor>(), other.get<ShardedTensor>());
    case ValueKind::nested_sharded_tensor:
      return same_shards(get<NestedShardedTensor>(), other.get<NestedShardedTensor>());
    case ValueKind::checkpointable:
      return get<std::shared_ptr<Checkpointable>>() == other.get<std::shared_ptr<Checkpointable>>();
    case ValueKind::opaque:
      return same_object(*get<std::shared_ptr<const OpaqueObject>>(),
                         *other.get<std::shared_ptr<const OpaqueObject>>());
    case ValueKind::stateful:
      return get<std::shared_ptr<Stateful>>() == other.get<std::shared_ptr<Stateful>>();
  }
  return false;
}

bool Dict::operator==(const Dict& other) const {
  if (size() != other.size()) return false;
  for (const Entry& entry : entries_) {
    const Value* found = other.find(entry.key);
    if (!found || *found != entry.value) return false;
  }
  return true;
}

}  // namespace tessera
