#include "state/local_state.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/resolve_conj.h>
#include <ATen/ops/resolve_neg.h>

#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "state/local_tensor.h"
#include "state/stateful_values.h"
#include "tessera/base/error.h"
#include "tessera/state/flatten.h"
#include "tessera/state/object_archive.h"

namespace tessera {

namespace {

using checkpoint::HostMemory;

HostMemory host_memory(const at::Tensor& tensor) {
  const auto host = std::make_shared<const at::Tensor>(tensor.cpu().resolve_conj().resolve_neg());
  return {static_cast<const std::uint8_t*>(host->data_ptr()), host->strides().vec(), host};
}

// Returns the elements and the pickled bytes of objects, by reference or as copies.
struct Access {
  std::function<at::Tensor(const std::string& name, std::size_t chunk, const at::Tensor& elements)> elements;
  std::function<std::function<Bytes()>(const Value& value)> object;
};

checkpoint::StateEntry entry_of(const std::string& name, Path path, const Value& value, const Access& access) {
  try {
    if (std::optional<LocalTensor> local = local_tensor_of(value)) {
      checkpoint::StateTensor tensor{local->properties, std::move(local->shape), {}};
      for (std::size_t c = 0; c < local->chunks.size(); ++c) {
        tensor.chunks.push_back(
            {std::move(local->chunks[c].first),
             [elements = access.elements(name, c, local->chunks[c].second)] { return host_memory(elements); }});
      }
      return {name, std::move(path), std::move(tensor)};
    }
    return {name, std::move(path), checkpoint::StateObject{access.object(value)}};
  } catch (const Error& error) {
    fail(error.code(), "save '{}': {}", printable(name), error.what());
  }
}

checkpoint::FlatState entries_of(const StateDict& state, const ProcessGroup& group, const SaveOptions& options,
                                 const Access& access) {
  FlatStateDict flat{state, {}};
  if (options.flatten_state_dict) flat = flatten_state_dict(state);
  if (options.flatten_sharded_tensors) flat.state_dict = without_nested(std::move(flat.state_dict), group);
  checkpoint::FlatState entries;
  entries.reserve(flat.state_dict.size());
  for (const auto& [key, value] : flat.state_dict) {
    const std::string name = flat_name({key});
    const auto path = flat.mapping.find(name);
    entries.push_back(entry_of(name, path == flat.mapping.end() ? Path{name} : path->second, value, access));
  }
  return entries;
}

}  // namespace

checkpoint::FlatState local_state(const StateDict& state, const ProcessGroup& group, const SaveOptions& options) {
  return entries_of(
      state, group, options,
      {[](const std::string&, std::size_t, const at::Tensor& elements) { return elements; },
       [](const Value& value) -> std::function<Bytes()> { return [value] { return save_object(value); }; }});
}

checkpoint::FlatState convert_on_all_ranks(
    const ProcessGroup& group, std::string_view operation, const StateDict& state,
    const std::function<void(CallArguments& arguments)>& describe,
    const std::function<checkpoint::FlatState(const StateDict& state)>& convert) {
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

namespace {

// What identifies the elements that a tensor shows.
using View = std::tuple<const void*, std::vector<std::int64_t>, std::vector<std::int64_t>, at::ScalarType, bool, bool>;

View view_of(const at::Tensor& tensor) {
  return {tensor.data_ptr(),    tensor.sizes().vec(), tensor.strides().vec(),
          tensor.scalar_type(), tensor.is_conj(),     tensor.is_neg()};
}

}  // namespace

checkpoint::FlatState StagingArea::copy(const StateDict& state, const ProcessGroup& group, const SaveOptions& options) {
  std::map<std::pair<std::string, std::size_t>, at::Tensor> used;
  std::map<View, at::Tensor> copied;
  std::set<const void*> taken;  // buffers
  checkpoint::FlatState entries = entries_of(
      state, group, options,
      {[&](const std::string& name, std::size_t chunk, const at::Tensor& elements) {
         at::Tensor& buffer = used[{name, chunk}];
         at::Tensor& copy = copied[view_of(elements)];
         if (copy.defined()) return buffer = copy;
         const auto before = buffers_.find({name, chunk});
         if (before != buffers_.end() && before->second.sizes() == elements.sizes() &&
             before->second.scalar_type() == elements.scalar_type() &&
             taken.insert(before->second.unsafeGetTensorImpl()).second) {
           buffer = before->second;
         } else {
           buffer = at::empty(elements.sizes(),
                              at::TensorOptions().dtype(elements.scalar_type()).pinned_memory(elements.is_cuda()));
         }
         buffer.copy_(elements);
         copy = buffer;
         taken.insert(buffer.unsafeGetTensorImpl());
         return buffer;
       },
       [](const Value& value) -> std::function<Bytes()> { return [bytes = save_object(value)] { return bytes; }; }});
  buffers_ = std::move(used);
  return entries;
}

std::uint64_t StagingArea::size_bytes() const {
  std::uint64_t sum = 0;
  std::set<const void*> counted;
  for (const auto& [key, buffer] : buffers_) {
    if (counted.insert(buffer.unsafeGetTensorImpl()).second) sum += buffer.nbytes();
  }
  return sum;
}

}  // namespace tessera
