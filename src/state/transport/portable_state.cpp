#include "state/transport/portable_state.h"

#include <memory>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/state/traverse.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

namespace {

// What another rank had of a tensor.
class ReceivedBoxes final : public Checkpointable {
 public:
  explicit ReceivedBoxes(const LocalTensor& local) : size_(local.shape), properties_(local.properties) {
    for (const auto& [box, tensor] : local.chunks) {
      boxes_.push_back(box);
      tensors_.push_back(tensor);
    }
  }
  const std::vector<std::int64_t>& size() const override { return size_; }
  std::optional<TensorProperties> properties() const override { return properties_; }
  const std::vector<Box>& local_chunks() const override { return boxes_; }
  at::Tensor local_tensor(std::size_t i) const override { return tensors_[i]; }

 private:
  std::vector<std::int64_t> size_;
  std::optional<TensorProperties> properties_;
  std::vector<Box> boxes_;
  std::vector<at::Tensor> tensors_;
};

class LeafMap {
 public:
  explicit LeafMap(MapLeaf map) : map_(map) {}

  Dict entries(const Dict& dict) {
    Dict result;
    result.reserve(dict.size());
    for (const auto& [key, value] : dict) {
      path_.push_back(key);
      result.insert_or_assign(key, mapped(value));
      path_.pop_back();
    }
    return result;
  }

 private:
  template <typename Sequence>
  Sequence items(const Sequence& sequence) {
    Sequence result;
    result.reserve(sequence.size());
    for (std::size_t i = 0; i < sequence.size(); ++i) {
      path_.emplace_back(static_cast<std::int64_t>(i));
      result.push_back(mapped(sequence[i]));
      path_.pop_back();
    }
    return result;
  }
  Value mapped(const Value& value) {
    if (const auto* dict = value.get_if<Dict>()) return entries(*dict);
    if (const auto* list = value.get_if<List>()) return items(*list);
    if (const auto* tuple = value.get_if<Tuple>()) return items(*tuple);
    return map_(position_++, path_, value);
  }

  MapLeaf map_;
  Path path_;
  std::size_t position_ = 0;
};

Value value_of(const std::optional<TensorProperties>& properties) {
  if (!properties) return nullptr;
  return Tuple{dtype_name(properties->dtype), properties->layout, properties->requires_grad,
               static_cast<int>(properties->memory_format), properties->pin_memory};
}

std::optional<TensorProperties> properties_in(const Value& value) {
  if (value.is_none()) return std::nullopt;
  const Tuple& members = value.get<Tuple>();
  const std::int64_t format = members.at(3).get<std::int64_t>();
  if (format < 0 || format > static_cast<int>(MemoryFormat::preserve)) {
    fail(ErrorCode::corrupt, "memory format {}, expected 0 to 2", format);
  }
  return TensorProperties{dtype_from_name(members.at(0).get<std::string>()), members.at(1).get<std::string>(),
                          members.at(2).get<bool>(), static_cast<MemoryFormat>(format), members.at(4).get<bool>()};
}

}  // namespace

StateDict map_leaves(const StateDict& state, MapLeaf map) { return LeafMap(map).entries(state); }

PortableState take_apart(const StateDict& state) {
  PortableState result;
  result.state = map_leaves(state, [&](std::size_t position, const Path& path, const Value& leaf) -> Value {
    if (!leaf.is_any_tensor()) return leaf;
    const auto where = [&] { return fmt::format("'{}'", printable(flat_name(path))); };
    result.tensors.push_back({position, leaf.is<at::Tensor>(), with_context(where, [&] {
                                LocalTensor local = *local_tensor_of(leaf);
                                for (const auto& [box, tensor] : local.chunks) {
                                  if (!tensor.is_meta() && tensor.has_storage()) continue;
                                  fail(ErrorCode::unsupported, "found {}, expected a tensor with memory",
                                       to_string(Value(tensor)));
                                }
                                return local;
                              })});
    return nullptr;
  });
  return result;
}

Value value_of(const TensorLeaf& leaf) {
  if (leaf.is_plain) return leaf.local.chunks.at(0).second;
  return std::make_shared<ReceivedBoxes>(leaf.local);
}

Value describe(const TensorLeaf& leaf) {
  List boxes;
  for (const auto& [box, tensor] : leaf.local.chunks) boxes.push_back(Tuple{list_of(box.offsets), list_of(box.sizes)});
  return Tuple{leaf.position, leaf.is_plain, value_of(leaf.local.properties), list_of(leaf.local.shape),
               std::move(boxes)};
}

TensorLeaf described_leaf(const Value& description) {
  const Tuple& members = description.get<Tuple>();
  TensorLeaf leaf{static_cast<std::size_t>(members.at(0).get<std::int64_t>()), members.at(1).get<bool>(), {}};
  leaf.local.properties = properties_in(members.at(2));
  leaf.local.shape = numbers_of(members.at(3));
  for (const Value& one : members.at(4).get<List>()) {
    Box box(numbers_of(one.get<Tuple>().at(0)), numbers_of(one.get<Tuple>().at(1)));
    if (!is_valid(box, leaf.local.shape)) {
      fail(ErrorCode::corrupt, "box {}, expected one within shape {}", to_string(box),
           shape_to_string(leaf.local.shape));
    }
    leaf.local.chunks.emplace_back(std::move(box), at::Tensor());
  }
  if (leaf.is_plain && (leaf.local.chunks.size() != 1 || leaf.local.chunks[0].first != Box::full(leaf.local.shape))) {
    fail(ErrorCode::corrupt, "a plain tensor of {} boxes, expected all of it", leaf.local.chunks.size());
  }
  return leaf;
}

List list_of(const std::vector<std::int64_t>& numbers) {
  return List(std::vector<Value>(numbers.begin(), numbers.end()));
}

std::vector<std::int64_t> numbers_of(const Value& list) {
  std::vector<std::int64_t> numbers;
  for (const Value& item : list.get<List>()) numbers.push_back(item.get<std::int64_t>());
  return numbers;
}

}  // namespace tessera
