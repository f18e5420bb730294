#include "tessera/state/gather_state_dict.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resolve_conj.h>
#include <ATen/ops/resolve_neg.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "state/local_tensor.h"
#include "state/map_tensors.h"
#include "tessera/base/error.h"
#include "tessera/layout/coverage.h"
#include "tessera/state/traverse.h"
#include "tessera/tensor/internal/box_view.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

namespace {

constexpr std::string_view kOperation = "gather a state dict";

// A sharded tensor of the state.
struct Sharded {
  std::string name;
  LocalTensor local;
};

// What all ranks have of a sharded tensor; equal on all ranks.
struct Layout {
  std::optional<DType> dtype;
  std::vector<std::vector<Box>> boxes;             // by rank: those that the rank sends
  std::set<std::vector<std::int64_t>> has_sender;  // the boxes with a sender, as offsets followed by sizes
  bool is_replicated = true;                       // every rank has all elements in one box
};

// Throws Error(invalid_argument) unless each chunk is within the tensor and has its dtype, and Error(unsupported) if it
// has no memory.
void check_chunks(const LocalTensor& local) {
  for (const auto& [box, tensor] : local.chunks) {
    if (!is_valid(box, local.shape)) {
      fail(ErrorCode::invalid_argument, "local chunk {}, expected a box within shape {}", to_string(box),
           shape_to_string(local.shape));
    }
    if (!local.properties || local.properties->dtype != to_dtype(tensor.scalar_type())) {
      fail(ErrorCode::invalid_argument, "the tensor of {} has dtype {}, expected {}", to_string(box),
           dtype_name(to_dtype(tensor.scalar_type())),
           local.properties ? dtype_name(local.properties->dtype) : std::string_view("known properties"));
    }
    require_memory(tensor);
  }
}

// Checks the plain tensors, too, if they are moved to the CPU.
std::vector<Sharded> sharded_tensors(const StateDict& state, bool cpu_offload) {
  std::vector<Sharded> found;
  for_each_tensor(state, [&](const Path& path, const Value& value) {
    const auto* plain = value.get_if<at::Tensor>();
    if (plain != nullptr && !cpu_offload) return;
    const std::string name = printable(flat_name(path));
    try {
      if (plain != nullptr) return require_memory(*plain);
      found.push_back({name, *local_tensor_of(value)});
      check_chunks(found.back().local);
    } catch (const Error& error) {
      fail(error.code(), "'{}': {}", name, error.what());
    }
  });
  return found;
}

// This rank's dtype, or -1, and boxes of each tensor as numbers.
Bytes encode(const std::vector<Sharded>& tensors) {
  Bytes bytes;
  const auto put = [&](std::int64_t number) { append_little_endian(bytes, static_cast<std::uint64_t>(number)); };
  for (const auto& [name, local] : tensors) {
    put(local.properties ? static_cast<std::int64_t>(local.properties->dtype) : -1);
    put(static_cast<std::int64_t>(local.chunks.size()));
    for (const auto& [box, tensor] : local.chunks) {
      for (const std::int64_t offset : box.offsets) put(offset);
      for (const std::int64_t size : box.sizes) put(size);
    }
  }
  return bytes;
}

// Adds what one rank has of a tensor to its layout, and moves `at` to what the rank has of the next one.
void add_rank(Layout& layout, const std::vector<std::int64_t>& shape, const std::uint8_t*& at,
              const std::string& name) {
  const auto next = [&] {
    const auto number = static_cast<std::int64_t>(load_little_endian<std::uint64_t>(at));
    at += sizeof(std::uint64_t);
    return number;
  };
  if (const std::int64_t code = next(); code >= 0) {
    const auto dtype = static_cast<DType>(code);
    if (layout.dtype && *layout.dtype != dtype) {
      fail(ErrorCode::invalid_argument, "{}: '{}' has dtype {} on rank {}, expected {} as on lower ranks", kOperation,
           name, dtype_name(dtype), layout.boxes.size(), dtype_name(*layout.dtype));
    }
    layout.dtype = dtype;
  }
  std::vector<Box> sent;
  bool has_all = false;
  for (std::int64_t count = next(); count > 0; --count) {
    std::vector<std::int64_t> numbers(2 * shape.size());
    for (std::int64_t& number : numbers) number = next();
    const auto middle = numbers.begin() + static_cast<std::ptrdiff_t>(shape.size());
    Box box({numbers.begin(), middle}, {middle, numbers.end()});
    has_all = has_all || box == Box::full(shape);
    if (!is_empty(box) && layout.has_sender.insert(std::move(numbers)).second) sent.push_back(std::move(box));
  }
  layout.is_replicated = layout.is_replicated && has_all;
  layout.boxes.push_back(std::move(sent));
}

// Throws Error(invalid_argument) unless the boxes partition the tensor.
void check_partition(const Layout& layout, const std::vector<std::int64_t>& shape, const std::string& name) {
  BoxList all(shape.size());
  for (const std::vector<Box>& boxes : layout.boxes) {
    for (const Box& box : boxes) all.push_back(box);
  }
  if (const auto hole = find_hole(shape, all)) {
    fail(ErrorCode::invalid_argument,
         "{}: no rank of the group has {} of '{}' of shape {}, expected boxes that partition it; pass the group of all "
         "ranks that have a part of it",
         kOperation, to_string(*hole), name, shape_to_string(shape));
  }
  if (const auto overlap = find_overlap(all)) {
    fail(ErrorCode::invalid_argument, "{}: boxes {} and {} of '{}' overlap, expected boxes that partition it",
         kOperation, to_string(all[overlap->first]), to_string(all[overlap->second]), name);
  }
}

std::vector<Layout> layouts_of(const std::vector<Sharded>& tensors, const ProcessGroup& group) {
  if (tensors.empty()) return {};
  const std::vector<Bytes> encoded = group.all_gather_bytes(encode(tensors));
  std::vector<const std::uint8_t*> at;
  at.reserve(encoded.size());
  for (const Bytes& bytes : encoded) at.push_back(bytes.data());
  std::vector<Layout> layouts(tensors.size());
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const auto& [name, local] = tensors[t];
    for (const std::uint8_t*& of_rank : at) add_rank(layouts[t], local.shape, of_rank, name);
    check_partition(layouts[t], local.shape, name);
    if (!layouts[t].dtype) {
      fail(ErrorCode::unsupported, "{}: no rank knows the dtype of '{}', expected it on one rank", kOperation, name);
    }
  }
  return layouts;
}

const at::Tensor& chunk_of(const LocalTensor& local, const Box& box) {
  return std::find_if(local.chunks.begin(), local.chunks.end(), [&](const auto& chunk) { return chunk.first == box; })
      ->second;
}

// Returns the elements of the boxes that this rank sends.
Bytes elements_to_send(const LocalTensor& local, const std::vector<Box>& sent) {
  Bytes bytes;
  for (const Box& box : sent) {
    const at::Tensor host = chunk_of(local, box).cpu().resolve_conj().resolve_neg().contiguous();
    append(bytes, ByteView(static_cast<const std::uint8_t*>(host.data_ptr()), host.nbytes()));
  }
  return bytes;
}

at::Tensor full_tensor_of(const Layout& layout, const std::vector<std::int64_t>& shape, std::vector<Bytes> received) {
  const at::TensorOptions options = at::TensorOptions().dtype(to_scalar_type(*layout.dtype));
  at::Tensor full = at::empty(shape, options);
  for (std::size_t rank = 0; rank < received.size(); ++rank) {
    std::uint8_t* at = received[rank].data();
    for (const Box& box : layout.boxes[rank]) {
      const at::Tensor part = at::from_blob(at, box.sizes, options);
      box_view(full, box).copy_(part);
      at += part.nbytes();
    }
  }
  return full;
}

// Returns the full tensor; undefined on ranks other than 0 with `cpu_offload`. A collective.
at::Tensor gather(const LocalTensor& local, const Layout& layout, const ProcessGroup& group, bool cpu_offload) {
  if (layout.is_replicated) {
    const at::Tensor all = chunk_of(local, Box::full(local.shape));
    return cpu_offload ? all.cpu() : all;
  }
  const Bytes mine = elements_to_send(local, layout.boxes[static_cast<std::size_t>(group.rank())]);
  std::vector<Bytes> received = cpu_offload ? group.gather_bytes(mine, 0) : group.all_gather_bytes(mine);
  if (received.empty()) return {};
  const at::Tensor full = full_tensor_of(layout, local.shape, std::move(received));
  return cpu_offload || local.chunks.empty() ? full : full.to(local.chunks[0].second.device());
}

}  // namespace

StateDict gather_state_dict(const StateDict& state, const ProcessGroup& group, bool cpu_offload) {
  const c10::NoGradGuard no_grad;
  std::vector<Sharded> tensors;
  group.check_call(kOperation, [&](CallArguments& arguments) {
    tensors = sharded_tensors(state, cpu_offload);
    arguments.add("cpu_offload", cpu_offload);
    for (const auto& [name, local] : tensors) arguments.add(name, shape_to_string(local.shape));
  });
  const std::vector<Layout> layouts = layouts_of(tensors, group);
  const bool has_result = !cpu_offload || group.rank() == 0;
  std::vector<at::Tensor> full;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    full.push_back(gather(tensors[t].local, layouts[t], group, cpu_offload));
  }
  if (!has_result) return {};
  std::size_t t = 0;
  return map_tensors(state, [&](const Value& value) -> Value {
    const auto* tensor = value.get_if<at::Tensor>();
    if (tensor == nullptr) return full[t++];
    return cpu_offload ? tensor->cpu() : *tensor;
  });
}

}  // namespace tessera
