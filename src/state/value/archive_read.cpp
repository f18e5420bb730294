// Reads a value from a torch.save archive.

#include <ATen/ATen.h>

#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "tessera/base/crc32.h"
#include "tessera/base/error.h"
#include "tessera/format/internal/python_meaning.h"
#include "tessera/format/torch_archive.h"
#include "tessera/state/object_archive.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

namespace {

using pickle::Kind;

// A small pickle can represent a huge value by repeated references. These limits bound how many more values and bytes
// of text may be read than fit into the pickle.
constexpr std::uint64_t kSpareValues = 100'000;
constexpr std::uint64_t kSpareText = 64u << 20;

// The bytes of storages; each storage is read once.
class Storages {
 public:
  using Read = std::function<Bytes(const torch_archive::StorageRef&)>;
  explicit Storages(Read read) : read_(std::move(read)) {}

  std::shared_ptr<const Bytes> bytes_of(const torch_archive::StorageRef& storage) {
    std::shared_ptr<const Bytes>& bytes = bytes_[storage.key];
    if (!bytes) bytes = std::make_shared<const Bytes>(read_(storage));
    return bytes;
  }

  // Returns the storage, which tensors share.
  const at::Tensor& tensor_of(const torch_archive::StorageRef& storage) {
    at::Tensor& tensor = tensors_[storage.key];
    if (!tensor.defined()) {
      const Bytes bytes = read_(storage);
      tensor = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
      if (!bytes.empty()) std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
    }
    return tensor;
  }

 private:
  Read read_;
  std::map<std::string, std::shared_ptr<const Bytes>> bytes_;
  std::map<std::string, at::Tensor> tensors_;
};

std::optional<at::ScalarType> scalar_type_of(DType dtype) {
  try {
    return to_scalar_type(dtype);
  } catch (const Error&) {
    return std::nullopt;
  }
}

class ObjectReader {
 public:
  ObjectReader(std::shared_ptr<const pickle::Tree> tree, Storages storages)
      : tree_(std::move(tree)),
        storages_(std::move(storages)),
        most_values_(kSpareValues + tree_->memory_bytes()),
        values_left_(most_values_) {}

  Value read(pickle::NodeRef value, std::size_t depth = 0) {
    if (depth > kMaxObjectDepth) {
      fail(ErrorCode::corrupt, "load object: the value nests deeper than {}, expected at most that", kMaxObjectDepth);
    }
    count_value();
    switch (value.kind()) {
      case Kind::none:
        return {};
      case Kind::boolean:
        return value.boolean();
      case Kind::integer:
        return value.integer();
      case Kind::floating:
        return value.floating();
      case Kind::string:
        count_text(value, value.string().size());
        return value.string();
      case Kind::bytes:
        count_text(value, value.bytes().size());
        return Bytes(value.bytes().begin(), value.bytes().end());
      case Kind::list:
        return List(read_all(value.items(), depth));
      case Kind::tuple:
        return Tuple(read_all(value.items(), depth));
      case Kind::dict:
        return read_dict(value, value.pairs(), depth);
      case Kind::object:
        return read_object(value, depth);
      default:
        return read_opaque(value);
    }
  }

 private:
  std::vector<Value> read_all(std::span<const pickle::NodeRef> items, std::size_t depth) {
    std::vector<Value> values;
    values.reserve(items.size());
    for (const pickle::NodeRef item : items) values.push_back(read(item, depth + 1));
    return values;
  }

  Value read_dict(pickle::NodeRef node, std::span<const pickle::Pair> pairs, std::size_t depth) {
    for (const pickle::Pair& pair : pairs) {
      if (!pair.key.is(Kind::string) && !pair.key.is(Kind::integer)) return read_opaque(node);
    }
    Dict dict;
    dict.reserve(pairs.size());
    for (const pickle::Pair& pair : pairs) {
      Key key;
      if (pair.key.is(Kind::string)) {
        count_text(pair.key, pair.key.string().size());
        key = std::string(pair.key.string());
      } else {
        key = pair.key.integer();
      }
      dict.insert_or_assign(key, read(pair.value, depth + 1));
    }
    return dict;
  }

  Value read_object(pickle::NodeRef value, std::size_t depth) {
    switch (pickle::meaning_of(value)) {
      case pickle::Meaning::ordered_dict:
        return read_dict(value, value.object().dict_items(), depth);
      case pickle::Meaning::size:
        return Tuple(read_all(pickle::size_items(value), depth));
      default:
        break;
    }
    if (const std::optional<torch_archive::TensorRef> tensor = torch_archive::as_tensor(value)) {
      if (const std::optional<at::ScalarType> type = scalar_type_of(tensor->dtype)) return read_tensor(*tensor, *type);
    }
    return read_opaque(value);
  }

  at::Tensor read_tensor(const torch_archive::TensorRef& ref, at::ScalarType type) {
    const at::Tensor& bytes = storages_.tensor_of(ref.storage);
    at::Tensor tensor = at::empty({0}, at::TensorOptions().dtype(type))
                            .set_(bytes.storage(), ref.storage_offset, ref.sizes, ref.strides);
    const bool differentiable = at::isFloatingType(type) || at::isComplexType(type);
    return ref.requires_grad && differentiable ? tensor.set_requires_grad(true) : tensor;
  }

  Value read_opaque(pickle::NodeRef value) {
    std::shared_ptr<const OpaqueObject>& known = opaque_[value.identity()];
    if (!known) {
      auto object = std::make_shared<OpaqueObject>();
      object->tree = tree_;
      object->value = value;
      std::unordered_set<std::uint64_t> seen;
      collect(value, *object, seen, 0);
      known = std::move(object);
    }
    return known;
  }

  void count_value() {
    if (values_left_-- == 0) {
      fail(ErrorCode::corrupt,
           "load object: repeated references expand to too many values, expected at most {} for a pickle of this size",
           most_values_);
    }
  }

  // Reads the storages that `value` refers to.
  void collect(pickle::NodeRef value, OpaqueObject& object, std::unordered_set<std::uint64_t>& seen,
               std::size_t depth) {
    if (depth > kMaxObjectDepth) {
      fail(ErrorCode::corrupt, "load object: the value nests deeper than {}, expected at most that", kMaxObjectDepth);
    }
    const auto collect_pairs = [&](std::span<const pickle::Pair> pairs) {
      for (const pickle::Pair& pair : pairs) {
        collect(pair.key, object, seen, depth + 1);
        collect(pair.value, object, seen, depth + 1);
      }
    };
    const auto collect_items = [&](std::span<const pickle::NodeRef> items) {
      for (const pickle::NodeRef item : items) collect(item, object, seen, depth + 1);
    };
    switch (value.kind()) {
      case Kind::list:
      case Kind::tuple:
      case Kind::set:
      case Kind::frozen_set:
      case Kind::dict:
      case Kind::object:
      case Kind::persistent_id:
        if (!seen.insert(value.identity()).second) return;
        count_value();
        break;
      default:
        return;
    }
    if (value.is(Kind::dict)) return collect_pairs(value.pairs());
    if (value.is(Kind::object)) {
      const pickle::Object& called = value.object();
      for (const pickle::NodeRef part : {called.callable, called.arguments, called.keyword_arguments(), called.state}) {
        collect(part, object, seen, depth + 1);
      }
      collect_items(called.list_items());
      collect_items(called.setter_calls());
      return collect_pairs(called.dict_items());
    }
    if (!value.is(Kind::persistent_id)) return collect_items(value.items());
    if (const std::optional<torch_archive::StorageRef> storage = torch_archive::as_storage(value.persistent_id())) {
      if (!object.storages.contains(storage->key)) object.storages[storage->key] = storages_.bytes_of(*storage);
    }
  }

  // Counts repeated references to the same text.
  void count_text(pickle::NodeRef text, std::size_t size) {
    if (texts_.insert(text.identity()).second) return;
    repeated_text_ += size;
    if (repeated_text_ > kSpareText) {
      fail(ErrorCode::corrupt,
           "load object: repeated references expand to too much text, expected at most {} bytes more than the pickle "
           "has",
           kSpareText);
    }
  }

  std::shared_ptr<const pickle::Tree> tree_;
  Storages storages_;
  std::uint64_t most_values_, values_left_;
  std::unordered_map<std::uint64_t, std::shared_ptr<const OpaqueObject>> opaque_;
  std::unordered_set<std::uint64_t> texts_;
  std::uint64_t repeated_text_ = 0;
};

Bytes read_entry(const ByteSource& source, const zip::Entry& entry, const torch_archive::StorageRef& storage) {
  if (entry.size_bytes < static_cast<std::uint64_t>(storage.size_bytes)) {
    fail(ErrorCode::corrupt, "{} at byte {}: {} has {} bytes, expected {}", source.name(), entry.data_offset_bytes,
         printable(entry.name), entry.size_bytes, storage.size_bytes);
  }
  if (entry.data_offset_bytes > source.size_bytes() ||
      entry.size_bytes > source.size_bytes() - entry.data_offset_bytes) {
    fail(ErrorCode::corrupt,
         "{} at byte {}: {} of {} bytes ends after the end of the file, expected it within its {} bytes", source.name(),
         entry.data_offset_bytes, printable(entry.name), entry.size_bytes, source.size_bytes());
  }
  Bytes bytes(entry.size_bytes);
  source.read_at(entry.data_offset_bytes, bytes);
  if (const std::uint32_t found = crc32(bytes); found != entry.crc32) {
    fail(ErrorCode::corrupt, "{} at byte {}: {} has CRC-32 {:08x}, expected {:08x}", source.name(),
         entry.data_offset_bytes, printable(entry.name), found, entry.crc32);
  }
  return bytes;
}

}  // namespace

Value load_object(ByteView archive, const std::string& name) {
  const MemorySource source(archive, name);
  auto opened = std::make_shared<torch_archive::Archive>(torch_archive::open(source, 0, source.size_bytes()));
  const std::shared_ptr<const pickle::Tree> tree(opened, &opened->tree);
  return ObjectReader(tree, Storages([&](const torch_archive::StorageRef& storage) {
                        return read_entry(source, opened->storage_entry(storage), storage);
                      }))
      .read(tree->root());
}

Value load_object(const checkpoint::ObjectValue& object, OpenFile open) {
  return ObjectReader(object.tree, Storages([&](const torch_archive::StorageRef& storage) {
                        const auto found = object.storages.find(storage.key);
                        if (found == object.storages.end()) {
                          fail(ErrorCode::corrupt, "load object: storage '{}' is missing, expected it in the archive",
                               printable(storage.key));
                        }
                        return read_entry(*open(found->second.file), found->second.entry, storage);
                      }))
      .read(object.value);
}

Value load_object(const checkpoint::Checkpoint& checkpoint, std::size_t i) {
  return load_object(checkpoint.load_object(i), [&](std::uint32_t file) -> std::shared_ptr<const ByteSource> {
    return checkpoint.open_file(file);
  });
}

}  // namespace tessera
