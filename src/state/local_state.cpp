#include "state/local_state.h"

#include <ATen/ops/resolve_conj.h>
#include <ATen/ops/resolve_neg.h>

#include <memory>
#include <utility>
#include <vector>

#include "state/flat_values.h"
#include "state/local_tensor.h"
#include "state/stateful/values.h"
#include "state/transport/device_staging.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/state/object_archive.h"

namespace tessera {

namespace {

using checkpoint::HostMemory;

HostMemory host_memory(const at::Tensor& tensor) {
  const bool is_plain = !tensor.is_conj() && !tensor.is_neg();
  const auto host =
      std::make_shared<const at::Tensor>(is_plain ? tensor : tensor.detach().resolve_conj().resolve_neg());
  return {static_cast<const std::uint8_t*>(host->data_ptr()), host->strides().vec(), host};
}

// How elements are read, and the pickled bytes of objects.
struct Access {
  std::function<std::function<HostMemory()>(const at::Tensor& elements)> memory;
  std::function<std::function<Bytes()>(const Value& value)> object;
};

checkpoint::StateEntry entry_of(std::string name, const Path& path, const Value& value, const Access& access) {
  try {
    if (std::optional<LocalTensor> local = attached_tensor_of(value)) {
      checkpoint::StateTensor tensor{std::move(local->properties), std::move(local->shape), {}};
      tensor.chunks.reserve(local->chunks.size());
      for (auto& [box, chunk] : local->chunks) {
        require_memory(chunk);
        tensor.chunks.push_back({std::move(box), access.memory(chunk)});
      }
      return {std::move(name), path, std::move(tensor)};
    }
    std::function<Bytes()> archive = access.object(value);
    return {std::move(name), path, checkpoint::StateObject{std::move(archive)}};
  } catch (const Error& error) {
    fail(error.code(), "save '{}': {}", printable(name), error.what());
  }
}

checkpoint::FlatState entries_of(const StateDict& state, const ProcessGroup& group, const SaveOptions& options,
                                 const Access& access) {
  const Flattening how = {.state_dict = options.flatten_state_dict, .sharded_tensors = options.flatten_sharded_tensors};
  checkpoint::FlatState entries;
  for_each_flat_value(state, how, group, [&](std::string name, const Path& path, const Value& value) {
    entries.push_back(entry_of(std::move(name), path, value, access));
  });
  require_unique_names(entries);
  return entries;
}

}  // namespace

checkpoint::FlatState local_state(const StateDict& state, const ProcessGroup& group, const SaveOptions& options) {
  DeviceStagings stagings(options.staging_bytes);
  const auto memory_of = [&](const at::Tensor& elements) -> std::function<HostMemory()> {
    if (elements.is_cpu() || elements.is_meta()) return [elements] { return host_memory(elements); };
    return [elements = elements.detach(), staging = stagings.of(elements.device())] {
      HostMemory memory;
      memory.read = [elements, staging](std::uint64_t begin_bytes, MutableByteView out) {
        staging->read(elements, begin_bytes, out);
      };
      return memory;
    };
  };
  return entries_of(state, group, options, {memory_of, [](const Value& value) -> std::function<Bytes()> {
                                              return [value] { return save_object(value); };
                                            }});
}

checkpoint::FlatState convert_on_all_ranks(const ProcessGroup& group, std::string_view operation,
                                           const StateDict& state, FunctionRef<void(CallArguments& arguments)> describe,
                                           FunctionRef<checkpoint::FlatState(const StateDict& state)> convert) {
  bool has_stateful = false;
  checkpoint::FlatState converted;
  group.check_call(operation, [&](CallArguments& arguments) {
    describe(arguments);
    has_stateful = describe_stateful(state, arguments);
    if (!has_stateful) converted = convert(state);
  });
  if (!has_stateful) return converted;
  const StateDict states = with_states(state, group, operation);
  return group.agree_on(operation, [&] { return convert(states); });
}

checkpoint::FlatState StagingArea::copy(const StateDict& state, const ProcessGroup& group, const SaveOptions& options) {
  std::vector<at::Tensor> tensors;
  const auto copies = std::make_shared<std::vector<HostCopy>>();
  const auto memory_of = [&](const at::Tensor& elements) -> std::function<HostMemory()> {
    tensors.push_back(elements.detach());
    return [copies, i = tensors.size() - 1] {
      const HostCopy& copy = (*copies)[i];
      copy.copied.synchronize();
      return host_memory(copy.elements);
    };
  };
  checkpoint::FlatState entries =
      entries_of(state, group, options, {memory_of, [](const Value& value) -> std::function<Bytes()> {
                                           return [bytes = save_object(value)] { return bytes; };
                                         }});
  *copies = copies_.copy(tensors);
  return entries;
}

}  // namespace tessera
