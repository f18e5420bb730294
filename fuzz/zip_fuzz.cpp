/// \file
/// Reads bytes as a zip, and as a torch.save archive in it: directory, pickle, and every tensor in the pickle with its
/// storage.

#include <cstdint>
#include <unordered_set>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/format/torch_archive.h"

namespace {

using tessera::pickle::Kind;
using tessera::pickle::NodeRef;

constexpr std::size_t kMaxNodes = 100'000;

// Computes what the checkpoint module computes from a tensor. It must not overflow and must stay inside the storage.
void use(const tessera::torch_archive::TensorRef& tensor, const tessera::zip::Entry& entry) {
  const std::int64_t size = tessera::dtype_size(tensor.dtype);
  std::int64_t last = 0, count = 1;
  for (std::size_t d = 0; d < tensor.sizes.size(); ++d) {
    last += (tensor.sizes[d] - 1) * tensor.strides[d];
    count *= tensor.sizes[d];
  }
  const std::int64_t begin = tensor.storage_offset * size;
  const std::int64_t end = count == 0 ? begin : begin + (last + 1) * size;
  if (begin < 0 || end < begin || static_cast<std::uint64_t>(end) > entry.size_bytes) __builtin_trap();
}

void visit(const tessera::torch_archive::Archive& archive, NodeRef value) {
  try {
    if (const auto tensor = tessera::torch_archive::as_tensor(value))
      use(*tensor, archive.storage_entry(tensor->storage));
  } catch (const tessera::Error&) {
  }
}

// Visits every node once, even if nodes contain each other.
void walk(const tessera::torch_archive::Archive& archive) {
  std::vector<NodeRef> waiting = {archive.tree.root()};
  std::unordered_set<std::uint64_t> seen;
  while (!waiting.empty() && seen.size() < kMaxNodes) {
    const NodeRef value = waiting.back();
    waiting.pop_back();
    if (!seen.insert(value.identity()).second) continue;
    const auto add_pairs = [&](std::span<const tessera::pickle::Pair> pairs) {
      for (const auto& pair : pairs) waiting.insert(waiting.end(), {pair.key, pair.value});
    };
    switch (value.kind()) {
      case Kind::list:
      case Kind::tuple:
      case Kind::set:
      case Kind::frozen_set:
        waiting.insert(waiting.end(), value.items().begin(), value.items().end());
        break;
      case Kind::dict:
        add_pairs(value.pairs());
        break;
      case Kind::object: {
        visit(archive, value);
        const tessera::pickle::Object& object = value.object();
        waiting.insert(waiting.end(), {object.callable, object.arguments, object.keyword_arguments(), object.state});
        waiting.insert(waiting.end(), object.list_items().begin(), object.list_items().end());
        waiting.insert(waiting.end(), object.setter_calls().begin(), object.setter_calls().end());
        add_pairs(object.dict_items());
        break;
      }
      default:
        break;
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const tessera::MemorySource source({data, size}, "input");
  try {
    for (const tessera::zip::Entry& entry : tessera::zip::read_directory(source, 0, size).entries) {
      if (entry.data_offset_bytes > size || entry.size_bytes > size - entry.data_offset_bytes) __builtin_trap();
    }
  } catch (const tessera::Error&) {
  }
  try {
    walk(tessera::torch_archive::open(source, 0, size));
  } catch (const tessera::Error&) {
  }
  return 0;
}
