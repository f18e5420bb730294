// Writes a value as a torch.save archive.

#include <ATen/ATen.h>

#include <algorithm>

#include "tessera/base/crc32.h"
#include "tessera/base/error.h"
#include "tessera/format/internal/pickle_text.h"
#include "tessera/format/pickle_writer.h"
#include "tessera/format/torch_archive.h"
#include "tessera/state/object_archive.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

namespace {

void check_text(std::string_view text) {
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t length = pickle::python_utf8_sequence_length(rest);
    if (length == 0) {
      fail(ErrorCode::invalid_argument,
           "save object: the str '{}' is not UTF-8 at byte {}, expected UTF-8; save other text as Bytes",
           printable(text, 60), text.size() - rest.size());
    }
    rest.remove_prefix(length);
  }
}

// Returns all bytes of the tensor's storage.
at::Tensor storage_bytes(const at::Tensor& tensor) {
  const auto size_bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
  return at::empty({0}, at::TensorOptions().dtype(at::kByte).device(tensor.device()))
      .set_(tensor.storage(), 0, {size_bytes}, {1});
}

class ObjectWriter {
 public:
  Bytes write(const Value& value) {
    Bytes data_pkl;
    pickle::Writer writer(data_pkl, 2);
    add(writer, value, 0);
    writer.stop();
    return assemble(std::move(data_pkl));
  }

 private:
  struct Storage {
    std::optional<DType> dtype;           // of its tensors
    at::Tensor bytes;                     // of a tensor
    std::shared_ptr<const Bytes> opaque;  // of an opaque object
    ByteView view() const {
      if (opaque) return *opaque;
      return {static_cast<const std::uint8_t*>(bytes.data_ptr()), static_cast<std::size_t>(bytes.numel())};
    }
  };

  void add(pickle::Writer& writer, const Value& value, std::size_t depth) {
    if (depth > kMaxObjectDepth) {
      fail(ErrorCode::unsupported, "save object: the value nests deeper than {}, expected at most that",
           kMaxObjectDepth);
    }
    switch (value.kind()) {
      case ValueKind::none:
        return writer.none();
      case ValueKind::boolean:
        return writer.boolean(value.get<bool>());
      case ValueKind::integer:
        return writer.integer(value.get<std::int64_t>());
      case ValueKind::floating:
        return writer.floating(value.get<double>());
      case ValueKind::string:
        check_text(value.get<std::string>());
        return writer.string(value.get<std::string>());
      case ValueKind::bytes:
        return writer.bytes(value.get<Bytes>());
      case ValueKind::list: {
        const List& list = value.get<List>();
        writer.empty_list();
        if (list.empty()) return;
        writer.mark();
        for (const Value& item : list) add(writer, item, depth + 1);
        return writer.appends();
      }
      case ValueKind::tuple: {
        const Tuple& tuple = value.get<Tuple>();
        if (tuple.size() > 3) writer.mark();
        for (const Value& item : tuple) add(writer, item, depth + 1);
        return tuple.size() > 3 ? writer.tuple_from_mark() : writer.tuple(tuple.size());
      }
      case ValueKind::dict: {
        const Dict& dict = value.get<Dict>();
        writer.empty_dict();
        if (dict.empty()) return;
        writer.mark();
        for (const auto& [key, item] : dict) {
          add_key(writer, key);
          add(writer, item, depth + 1);
        }
        return writer.set_items();
      }
      case ValueKind::tensor:
        return add_tensor(writer, value.get<at::Tensor>());
      case ValueKind::opaque:
        return add_opaque(writer, *value.get<std::shared_ptr<const OpaqueObject>>());
      case ValueKind::sharded_tensor:
      case ValueKind::nested_sharded_tensor:
      case ValueKind::checkpointable:
      case ValueKind::stateful:
        fail(ErrorCode::unsupported, "save object: found {}, expected plain tensors and Python values only",
             to_string(value));
    }
  }

  static void add_key(pickle::Writer& writer, const Key& key) {
    if (const auto* index = std::get_if<std::int64_t>(&key)) return writer.integer(*index);
    check_text(std::get<std::string>(key));
    writer.interned_string(std::get<std::string>(key));
  }

  void add_tensor(pickle::Writer& writer, const at::Tensor& tensor) {
    if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_meta() || !tensor.has_storage()) {
      fail(ErrorCode::unsupported, "save object: found {}, expected a strided tensor with a storage",
           to_string(Value(tensor)));
    }
    const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg();
    torch_archive::TensorRef ref;
    ref.dtype = to_dtype(plain.scalar_type());
    ref.storage.key = key_of(plain, ref.dtype);
    ref.storage.location = plain.device().str();
    ref.storage.size_bytes = static_cast<std::int64_t>(plain.storage().nbytes());
    ref.storage_offset = plain.storage_offset();
    ref.sizes = plain.sizes().vec();
    ref.strides = plain.strides().vec();
    ref.requires_grad = tensor.requires_grad();
    torch_archive::write_tensor(writer, ref);
  }

  std::string key_of(const at::Tensor& tensor, DType dtype) {
    const void* identity = tensor.storage().unsafeGetStorageImpl();
    const auto [found, is_new] = known_.try_emplace(identity, storages_.size());
    if (is_new) {
      held_.push_back(tensor);
      storages_.push_back({dtype, storage_bytes(tensor).cpu(), nullptr});
    } else if (storages_[found->second].dtype != dtype) {
      fail(ErrorCode::unsupported, "save object: tensors of {} and {} share one storage, expected one dtype",
           dtype_name(*storages_[found->second].dtype), dtype_name(dtype));
    }
    return std::to_string(found->second);
  }

  void add_opaque(pickle::Writer& writer, const OpaqueObject& object) {
    writer.value(object.value, [&](pickle::Writer& out, pickle::NodeRef id) {
      std::optional<torch_archive::StorageRef> storage = torch_archive::as_storage(id);
      if (!storage) return false;
      const auto bytes = object.storages.find(storage->key);
      if (bytes == object.storages.end()) {
        fail(ErrorCode::invalid_argument,
             "save object: storage '{}' of an opaque object is missing, expected its bytes", printable(storage->key));
      }
      const auto [found, is_new] = known_.try_emplace(bytes->second.get(), storages_.size());
      if (is_new) storages_.push_back({std::nullopt, at::Tensor(), bytes->second});
      storage->key = std::to_string(found->second);
      torch_archive::write_storage_id(out, *storage);
      return true;
    });
  }

  Bytes assemble(Bytes data_pkl) const {
    std::vector<torch_archive::ArchiveLayout::Storage> planned;
    for (std::size_t i = 0; i < storages_.size(); ++i) {
      planned.push_back({std::to_string(i), storages_[i].view().size()});
    }
    const torch_archive::ArchiveLayout layout("archive", std::move(data_pkl), planned);
    Bytes archive;
    archive.reserve(layout.total_bytes());
    std::vector<std::uint32_t> crcs;
    for (std::size_t i = 0; i < storages_.size(); ++i) {
      append(archive, layout.before_storage(i, crcs));
      append(archive, storages_[i].view());
      crcs.push_back(crc32(storages_[i].view()));
    }
    append(archive, layout.trailer(crcs));
    return archive;
  }

  std::vector<Storage> storages_;             // by key
  std::map<const void*, std::size_t> known_;  // keys by the owner of the bytes
  std::vector<at::Tensor> held_;              // keeps addresses of storages unique
};

}  // namespace

Bytes save_object(const Value& value) { return ObjectWriter().write(value); }

}  // namespace tessera
