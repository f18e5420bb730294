#include "tessera/state/transport.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <exception>
#include <map>
#include <memory>
#include <utility>

#include "state/stateful/values.h"
#include "state/transport/portable_state.h"
#include "state/transport/spans.h"
#include "tessera/base/error.h"
#include "tessera/comm/point_to_point.h"
#include "tessera/state/object_archive.h"
#include "tessera/state/traverse.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

namespace {

constexpr std::string_view kSend = "send a state dict", kReceive = "receive a state dict";

// Returns `state` with the state of each Stateful in its place.
StateDict without_statefuls(const StateDict& state, bool& has_stateful) {
  CallArguments names;
  has_stateful = describe_stateful(state, names);
  return has_stateful ? with_states(state, ProcessGroup(), kSend) : state;
}

Value describe(const SpanView& view) {
  return Tuple{view.span,
               dtype_name(to_dtype(view.dtype)),
               view.offset,
               list_of(view.sizes),
               list_of(view.strides),
               view.is_conj,
               view.is_neg};
}

SpanView described_view(const Value& description) {
  const Tuple& members = description.get<Tuple>();
  return {static_cast<std::size_t>(members.at(0).get<std::int64_t>()),
          to_scalar_type(dtype_from_name(members.at(1).get<std::string>())),
          members.at(2).get<std::int64_t>(),
          numbers_of(members.at(3)),
          numbers_of(members.at(4)),
          members.at(5).get<bool>(),
          members.at(6).get<bool>()};
}

// Returns contiguous memory of the CPU as a tensor of one dimension of bytes.
at::Tensor as_one_row(const at::Tensor& memory) {
  return at::from_blob(
      memory.data_ptr(), {static_cast<std::int64_t>(memory.nbytes())}, [memory](void*) {},
      at::TensorOptions().dtype(at::kByte));
}

struct Outgoing {
  Bytes description;
  std::vector<at::Tensor> memory;  // of each span
};

Outgoing outgoing(const StateDict& state) {
  bool has_stateful = false;
  PortableState portable = take_apart(without_statefuls(state, has_stateful));
  std::vector<at::Tensor> elements;
  List tensors, views, sizes;
  for (const TensorLeaf& leaf : portable.tensors) {
    tensors.push_back(describe(leaf));
    for (const auto& [box, tensor] : leaf.local.chunks) elements.push_back(tensor);
  }
  const Spans spans = spans_of(elements);
  Outgoing result;
  for (const SpanView& view : spans.views) views.push_back(describe(view));
  for (const at::Tensor& source : spans.sources) {
    sizes.push_back(source.nbytes());
    result.memory.push_back(as_one_row(source.cpu().resolve_conj().resolve_neg().contiguous()));
  }
  result.description = save_object(Dict{{"state", std::move(portable.state)},
                                        {"tensors", std::move(tensors)},
                                        {"views", std::move(views)},
                                        {"spans", std::move(sizes)}});
  return result;
}

// A state dict that arrives: first its description, then its elements.
class Incoming {
 public:
  explicit Incoming(ByteView description) {
    const Value loaded = load_object(description, std::string(kReceive));
    const Dict& parts = loaded.get<Dict>();
    state_ = parts.at("state").get<Dict>();
    for (const Value& one : parts.at("spans").get<List>()) {
      const std::int64_t size = one.get<std::int64_t>();
      if (size < 0) fail(ErrorCode::corrupt, "a span of {} bytes, expected at least 0", size);
      sizes_.push_back(size);
    }
    uses_.resize(sizes_.size());
    for (const Value& one : parts.at("views").get<List>()) {
      views_.push_back(described_view(one));
      if (views_.back().span >= sizes_.size()) {
        fail(ErrorCode::corrupt, "span {}, expected one of {}", views_.back().span, sizes_.size());
      }
      ++uses_[views_.back().span];
    }
    std::size_t chunks = 0;
    for (const Value& one : parts.at("tensors").get<List>()) {
      tensors_.push_back(described_leaf(one));
      for (const auto& [box, tensor] : tensors_.back().local.chunks) {
        if (chunks >= views_.size() || views_[chunks].sizes != box.sizes) {
          fail(ErrorCode::corrupt, "box {} without a view of its sizes, expected one", to_string(box));
        }
        ++chunks;
      }
    }
    targets_.resize(chunks);
    std::size_t tensor = 0;
    map_leaves(state_, [&](std::size_t position, const Path& path, const Value&) -> Value {
      if (tensor < tensors_.size() && tensors_[tensor].position == position) {
        paths_.push_back(path);
        ++tensor;
      }
      return nullptr;
    });
    if (tensor != tensors_.size() || chunks != views_.size()) {
      fail(ErrorCode::corrupt, "{} of {} tensors and {} of {} views are used, expected all", tensor, tensors_.size(),
           chunks, views_.size());
    }
  }

  // Receives elements into the tensors of `state`. Throws Error(invalid_argument) if they differ from those that come.
  void into(const StateDict& state) {
    std::map<Path, Value> own;
    map_leaves(state, [&](std::size_t, const Path& path, const Value& leaf) -> Value {
      if (leaf.is_any_tensor()) own.emplace(path, leaf);
      return nullptr;
    });
    std::size_t chunk = 0;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const auto name = [&] { return fmt::format("'{}'", printable(flat_name(paths_[i]))); };
      with_context(name, [&] {
        const auto found = own.find(paths_[i]);
        if (found == own.end()) {
          fail(ErrorCode::invalid_argument, "a tensor is sent, expected one in the state to receive into");
        }
        const LocalTensor local = *local_tensor_of(found->second);
        require_same(tensors_[i].local, local);
        for (const auto& [box, tensor] : local.chunks) {
          if (tensor.scalar_type() != views_[chunk].dtype) {
            fail(ErrorCode::invalid_argument, "found dtype {}, expected {} as sent",
                 dtype_name(to_dtype(tensor.scalar_type())), dtype_name(to_dtype(views_[chunk].dtype)));
          }
          if (tensor.is_meta() || overlaps_itself(tensor)) {
            fail(ErrorCode::invalid_argument,
                 "found a tensor on meta or one that overlaps itself, expected memory for "
                 "each element");
          }
          targets_[chunk++] = tensor;
        }
      });
      results_.push_back(own.at(paths_[i]));
      own.erase(paths_[i]);
    }
    if (own.empty()) return;
    fail(ErrorCode::invalid_argument, "'{}': no tensor is sent, expected one for the tensor in the state",
         printable(flat_name(own.begin()->first)));
  }

  // Returns the memory for each span. May be called once.
  const std::vector<at::Tensor>& memory() {
    memory_.resize(sizes_.size());
    for (std::size_t i = 0; i < views_.size(); ++i) {
      at::Tensor& memory = memory_[views_[i].span];
      if (is_direct(i)) memory = as_one_row(targets_[i]);
    }
    for (std::size_t s = 0; s < sizes_.size(); ++s) {
      if (!memory_[s].defined()) memory_[s] = at::empty({sizes_[s]}, at::TensorOptions().dtype(at::kByte));
    }
    return memory_;
  }

  // Returns the state dict after the memory has been filled.
  StateDict finish() {
    std::size_t chunk = 0;
    for (TensorLeaf& leaf : tensors_) {
      for (auto& [box, tensor] : leaf.local.chunks) {
        if (!is_direct(chunk)) {
          tensor = view_in(memory_[views_[chunk].span], views_[chunk]);
          if (targets_[chunk].defined()) targets_[chunk].copy_(tensor);
        }
        ++chunk;
      }
    }
    std::size_t next = 0;
    return map_leaves(state_, [&](std::size_t position, const Path&, const Value& leaf) -> Value {
      if (next == tensors_.size() || tensors_[next].position != position) return leaf;
      const std::size_t i = next++;
      return results_.empty() ? value_of(tensors_[i]) : results_[i];
    });
  }

 private:
  static void require_same(const LocalTensor& sent, const LocalTensor& own) {
    const auto boxes = [](const LocalTensor& local) {
      std::string text;
      for (const auto& [box, tensor] : local.chunks) text += (text.empty() ? "" : ", ") + to_string(box);
      return fmt::format("boxes [{}] of shape {}", text, shape_to_string(local.shape));
    };
    if (boxes(sent) == boxes(own)) return;
    fail(ErrorCode::invalid_argument, "found {}, expected {} as sent", boxes(own), boxes(sent));
  }

  // Returns whether the elements of a view are received where they belong.
  bool is_direct(std::size_t i) const {
    const SpanView& view = views_[i];
    const at::Tensor& target = targets_[i];
    if (!target.defined() || !target.is_cpu() || !target.is_contiguous() || target.is_conj() || target.is_neg() ||
        view.is_conj || view.is_neg || uses_[view.span] != 1) {
      return false;
    }
    return view.offset == 0 && static_cast<std::int64_t>(target.nbytes()) == sizes_[view.span] &&
           target.strides() == at::IntArrayRef(view.strides);
  }

  Dict state_;
  std::vector<std::int64_t> sizes_;  // of the spans, in bytes
  std::vector<std::size_t> uses_;    // of each span by views
  std::vector<SpanView> views_;      // of the chunks of all tensors, in order
  std::vector<TensorLeaf> tensors_;
  std::vector<Path> paths_;          // of the tensors
  std::vector<at::Tensor> targets_;  // of each view; undefined for new memory
  std::vector<Value> results_;       // the tensors to receive into; empty for new ones
  std::vector<at::Tensor> memory_;   // of each span
};

// Returns the exception that `f` throws, or null.
template <typename F>
std::exception_ptr exception_of(const F& f) {
  try {
    f();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace

void send_state_dict(const StateDict& state, std::span<const int> to, const ProcessGroup& group) {
  Outgoing message;
  const std::exception_ptr failure = exception_of([&] { message = outgoing(state); });
  std::exception_ptr first;
  for (const int rank : to) {
    const std::exception_ptr refused = exception_of([&] {
      agree_with(group, rank, kSend, failure);
      send_bytes(group, message.description, rank);
      agree_with(group, rank, kReceive, nullptr);
      send_tensors(group, message.memory, rank);
    });
    if (!first) first = refused;
  }
  if (first) std::rethrow_exception(first);
}

void send_state_dict(const StateDict& state, std::initializer_list<int> to, const ProcessGroup& group) {
  send_state_dict(state, std::span(to.begin(), to.size()), group);
}

StateDict receive_state_dict(int from, const ProcessGroup& group) {
  agree_with(group, from, kSend, nullptr);
  const Bytes description = receive_bytes(group, from);
  std::optional<Incoming> incoming;
  agree_with(group, from, kReceive, exception_of([&] { incoming.emplace(description); }));
  receive_tensors(group, incoming->memory(), from);
  return incoming->finish();
}

void receive_state_dict_into(StateDict& state, int from, const ProcessGroup& group) {
  bool has_stateful = false;
  StateDict values;
  const std::exception_ptr failure = exception_of([&] { values = without_statefuls(state, has_stateful); });
  agree_with(group, from, kSend, failure);
  const Bytes description = receive_bytes(group, from);
  std::optional<Incoming> incoming;
  agree_with(group, from, kReceive, exception_of([&] {
               incoming.emplace(description);
               incoming->into(values);
             }));
  receive_tensors(group, incoming->memory(), from);
  values = incoming->finish();
  if (has_stateful) load_states(state, values, ProcessGroup());
  state = std::move(values);
}

}  // namespace tessera
