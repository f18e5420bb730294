// Prints values as Python does.

#include <ostream>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/format/python_value.h"
#include "tessera/state/value.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

namespace {

std::string repr_of(FunctionRef<pickle::NodeRef(pickle::Tree&)> make, std::size_t limit = SIZE_MAX) {
  pickle::Tree tree;
  return pickle::repr(make(tree), limit);
}

std::string dtype_text(const at::Tensor& tensor) {
  std::string text(c10::toString(tensor.scalar_type()));
  try {
    text = dtype_name(to_dtype(tensor.scalar_type()));
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): use LibTorch's own name
  }
  return text;
}

class Printer {
 public:
  explicit Printer(std::size_t limit) : limit_(limit) {}

  void print(const Value& value) {
    if (full()) return;
    switch (value.kind()) {
      case ValueKind::none:
        return add("None");
      case ValueKind::boolean:
        return add(value.get<bool>() ? "True" : "False");
      case ValueKind::integer:
        return add(std::to_string(value.get<std::int64_t>()));
      case ValueKind::floating:
        return add(repr_of([&](pickle::Tree& tree) { return tree.make_floating(value.get<double>()); }));
      case ValueKind::string:
        return add(
            repr_of([&](pickle::Tree& tree) { return tree.make_borrowed_string(value.get<std::string>()); }, left()));
      case ValueKind::bytes:
        return add(repr_of([&](pickle::Tree& tree) { return tree.make_borrowed_bytes(value.get<Bytes>()); }, left()));
      case ValueKind::list:
        return print_items(value.get<List>(), "[", "]");
      case ValueKind::tuple:
        return print_items(value.get<Tuple>(), "(", value.get<Tuple>().size() == 1 ? ",)" : ")");
      case ValueKind::dict:
        return print_dict(value.get<Dict>());
      case ValueKind::tensor:
        return print_tensor(value.get<at::Tensor>());
      case ValueKind::sharded_tensor: {
        const ShardedTensor& tensor = value.get<ShardedTensor>();
        return print_sharded("sharded", tensor.metadata(), tensor.local_shards().size());
      }
      case ValueKind::nested_sharded_tensor: {
        const NestedShardedTensor& tensor = value.get<NestedShardedTensor>();
        return print_sharded("nested sharded", tensor.metadata, tensor.local_shards.size());
      }
      case ValueKind::checkpointable: {
        const Checkpointable& tensor = *value.get<std::shared_ptr<Checkpointable>>();
        const std::optional<TensorProperties> properties = tensor.properties();
        return add(fmt::format("<checkpointable {} tensor {}, {} chunks here>",
                               properties ? dtype_name(properties->dtype) : "unknown", shape_to_string(tensor.size()),
                               tensor.local_chunks().size()));
      }
      case ValueKind::opaque:
        return add(pickle::repr(value.get<std::shared_ptr<const OpaqueObject>>()->value, left()));
      case ValueKind::stateful:
        return add("<stateful>");
    }
  }

  void print_dict(const Dict& dict) {
    add("{");
    bool first = true;
    for (const auto& [key, value] : dict) {
      if (full()) break;
      if (!std::exchange(first, false)) add(", ");
      add(to_string(key));
      add(": ");
      print(value);
    }
    add("}");
  }

  std::string take() && {
    if (text_.size() > limit_) {
      text_.resize(limit_);
      text_ += "...";
    }
    return std::move(text_);
  }

 private:
  bool full() const { return text_.size() > limit_; }
  std::size_t left() const { return limit_ - text_.size() + (limit_ == SIZE_MAX ? 0 : 1); }
  void add(std::string_view text) { text_ += text; }

  void print_items(const ValueSequence& items, std::string_view begin, std::string_view end) {
    add(begin);
    for (std::size_t i = 0; i < items.size() && !full(); ++i) {
      if (i != 0) add(", ");
      print(items[i]);
    }
    add(end);
  }

  void print_tensor(const at::Tensor& tensor) {
    const std::string device = tensor.device().is_cpu() ? "" : " on " + tensor.device().str();
    add(fmt::format("<{} tensor {}{}>", dtype_text(tensor), shape_to_string(tensor.sizes().vec()), device));
  }

  void print_sharded(std::string_view what, const ShardedTensorMetadata& metadata, std::size_t local_shards) {
    add(fmt::format("<{} {} tensor {}, {} of {} shards here>", what, dtype_name(metadata.tensor_properties.dtype),
                    shape_to_string(metadata.size), local_shards, metadata.shards_metadata.size()));
  }

  std::size_t limit_;
  std::string text_;
};

}  // namespace

std::string to_string(const Key& key) {
  if (const auto* index = std::get_if<std::int64_t>(&key)) return std::to_string(*index);
  return repr_of([&](pickle::Tree& tree) { return tree.make_borrowed_string(std::get<std::string>(key)); });
}

std::string to_string(const Value& value, std::size_t limit) {
  Printer printer(limit);
  printer.print(value);
  return std::move(printer).take();
}

std::ostream& operator<<(std::ostream& out, const Value& value) { return out << to_string(value); }

std::ostream& operator<<(std::ostream& out, const Dict& dict) {
  Printer printer(SIZE_MAX);
  printer.print_dict(dict);
  return out << std::move(printer).take();
}

}  // namespace tessera
