#include "tessera/state/internal/entries_of_rank0.h"

#include <ATen/ops/full.h>

#include "state/map_tensors.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/state/object_archive.h"

namespace tessera {

namespace {

// Returns copies of the tensors that are a part of their storage, all of which an archive would have.
Dict without_rest_of_storages(const Dict& dict) {
  return map_tensors(dict, [](const Value& value) -> Value {
    const auto* tensor = value.get_if<at::Tensor>();
    const bool is_part = tensor != nullptr && tensor->has_storage() && tensor->nbytes() < tensor->storage().nbytes();
    return is_part ? Value(tensor->clone()) : value;
  });
}

}  // namespace

void for_each_entry_of_rank0(const Dict& dict, const ProcessGroup& group,
                             FunctionRef<void(const Key& key, const Value& value)> f) {
  const bool is_sender = group.rank() == 0;
  const at::Tensor count = at::full({1}, static_cast<std::int64_t>(dict.size()), at::kLong);
  group.broadcast(count, 0);
  auto entry = dict.begin();
  for (std::int64_t i = 0; i < count.item<std::int64_t>(); ++i) {
    const Bytes archive = group.agree_on("send a state", [&] {
      if (!is_sender || group.size() == 1) return Bytes();
      try {
        return save_object(without_rest_of_storages(Dict{*entry}));
      } catch (const Error& error) {
        fail(error.code(), "{}: {}", to_string(entry->key), error.what());
      }
    });
    const Bytes received = group.broadcast_bytes(archive, 0);
    if (is_sender) {
      f(entry->key, entry->value);
      ++entry;
      continue;
    }
    const Value sent = load_object(received, "state of rank 0");
    for (const auto& [key, value] : sent.get<Dict>()) f(key, value);
  }
}

}  // namespace tessera
