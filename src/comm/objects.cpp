#include "tessera/comm/objects.h"

#include <torch/csrc/jit/serialization/pickle.h>

namespace tessera {

namespace {

Bytes pickled(const c10::IValue& value) {
  const std::vector<char> bytes = torch::jit::pickle_save(value);
  return {bytes.begin(), bytes.end()};
}

c10::IValue unpickled(const Bytes& bytes) { return torch::jit::pickle_load({bytes.begin(), bytes.end()}); }

std::vector<c10::IValue> unpickled(const std::vector<Bytes>& parts) {
  std::vector<c10::IValue> values;
  values.reserve(parts.size());
  for (const Bytes& part : parts) values.push_back(unpickled(part));
  return values;
}

}  // namespace

std::vector<c10::IValue> all_gather_object(const ProcessGroup& group, const c10::IValue& value) {
  return unpickled(group.all_gather_bytes(pickled(value)));
}

std::vector<c10::IValue> gather_object(const ProcessGroup& group, const c10::IValue& value, int root) {
  return unpickled(group.gather_bytes(pickled(value), root));
}

c10::IValue broadcast_object(const ProcessGroup& group, const c10::IValue& value, int root) {
  return unpickled(group.broadcast_bytes(group.rank() == root ? pickled(value) : Bytes(), root));
}

c10::IValue scatter_object(const ProcessGroup& group, const std::vector<c10::IValue>& values, int root) {
  std::vector<Bytes> parts;
  if (group.rank() == root) {
    for (const c10::IValue& value : values) parts.push_back(pickled(value));
  }
  return unpickled(group.scatter_bytes(parts, root));
}

}  // namespace tessera
