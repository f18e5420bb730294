#include "tessera/comm/objects.h"

#include <torch/csrc/jit/serialization/pickle.h>

#include <span>
#include <string_view>

#include "comm/exceptions.h"

namespace tessera {

namespace {

Bytes pickled(std::string_view call, const c10::IValue& value) {
  try {
    const std::vector<char> bytes = torch::jit::pickle_save(value);
    return {bytes.begin(), bytes.end()};
  } catch (...) {
    fail(ErrorCode::invalid_argument, "{}: found a value of type {}, expected one that LibTorch can pickle: {}", call,
         value.tagKind(), comm::message_of(std::current_exception()));
  }
}

// Returns the pickles of this rank's values, after all ranks have theirs.
std::vector<Bytes> all_pickled(const ProcessGroup& group, std::string_view call, std::span<const c10::IValue> values) {
  std::vector<Bytes> parts;
  group.check_call(call, [&](CallArguments&) {
    for (const c10::IValue& value : values) parts.push_back(pickled(call, value));
  });
  return parts;
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
  return unpickled(group.all_gather_bytes(all_pickled(group, "all_gather_object", {&value, 1})[0]));
}

std::vector<c10::IValue> gather_object(const ProcessGroup& group, const c10::IValue& value, int root) {
  return unpickled(group.gather_bytes(all_pickled(group, "gather_object", {&value, 1})[0], root));
}

c10::IValue broadcast_object(const ProcessGroup& group, const c10::IValue& value, int root) {
  std::vector<Bytes> own =
      all_pickled(group, "broadcast_object", {&value, std::size_t{group.rank() == root ? 1u : 0u}});
  own.resize(1);
  return unpickled(group.broadcast_bytes(own[0], root));
}

c10::IValue scatter_object(const ProcessGroup& group, const std::vector<c10::IValue>& values, int root) {
  const std::span<const c10::IValue> own(values.data(), group.rank() == root ? values.size() : 0);
  return unpickled(group.scatter_bytes(all_pickled(group, "scatter_object", own), root));
}

}  // namespace tessera
