// Writes torch.save's output: the pickle of a tensor, opcode for opcode, and an archive whose size and offsets are
// known before its data.

#include <algorithm>

#include "format/torch_archive/names.h"
#include "tessera/base/crc32.h"
#include "tessera/base/error.h"
#include "tessera/format/torch_archive.h"

namespace tessera::torch_archive {
namespace {

void write_tuple(pickle::Writer& writer, const std::vector<std::int64_t>& numbers) {
  if (numbers.size() > 3) writer.mark();
  for (const std::int64_t number : numbers) writer.integer(number);
  if (numbers.size() > 3) {
    writer.tuple_from_mark();
  } else {
    writer.tuple(numbers.size());
  }
  if (!numbers.empty()) writer.memoize();
}

void reduce(pickle::Writer& writer) {
  writer.reduce();
  writer.memoize();
}

// No hooks: OrderedDict().
void write_hooks(pickle::Writer& writer) {
  writer.interned_global("collections", "OrderedDict");
  writer.tuple(0);
  reduce(writer);
}

constexpr std::string_view kPlainName = "a name without '/' and '\\' that is not empty, '.' or '..'";

bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find_first_of("/\\") == std::string_view::npos;
}

std::uint64_t fnv1a(ByteView bytes, std::uint64_t hash = 0xcbf29ce484222325) {
  for (const std::uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3;
  return hash;
}

}  // namespace

void write_storage_id(pickle::Writer& writer, const StorageRef& storage) {
  writer.mark();
  writer.interned_string("storage");
  std::int64_t numel = storage.size_bytes;
  if (!storage.dtype) {
    writer.interned_global("torch.storage", "UntypedStorage");
  } else if (const std::optional<std::string_view> name = storage_class(*storage.dtype)) {
    writer.interned_global("torch", *name);
    numel /= dtype_size(*storage.dtype);
  } else {
    fail(ErrorCode::unsupported,
         "torch.save: dtype {} has no storage class, expected a dtype that has one, such as float32",
         dtype_name(*storage.dtype));
  }
  writer.interned_string(storage.key);
  writer.interned_string(storage.location);
  writer.integer(numel);
  writer.tuple_from_mark();
  writer.memoize();
}

void write_tensor(pickle::Writer& writer, const TensorRef& tensor) {
  if (tensor.is_parameter) {
    TensorRef data = tensor;
    data.is_parameter = data.requires_grad = false;
    writer.interned_global("torch._utils", "_rebuild_parameter");
    write_tensor(writer, data);
    writer.boolean(tensor.requires_grad);
    write_hooks(writer);
    writer.tuple(3);
    writer.memoize();
    return reduce(writer);
  }
  switch (tensor.dtype) {
    case DType::qint8:
    case DType::qint32:
    case DType::quint8:
    case DType::quint4x2:
    case DType::quint2x4:
      fail(ErrorCode::unsupported, "torch.save: a tensor of dtype {}, expected a dtype without quantizer",
           dtype_name(tensor.dtype));
    default:
      break;
  }
  const bool is_typed = storage_class(tensor.dtype).has_value();
  writer.interned_global("torch._utils", is_typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
  writer.mark();
  StorageRef storage = tensor.storage;
  storage.dtype = is_typed ? std::optional(tensor.dtype) : std::nullopt;
  write_storage_id(writer, storage);
  writer.persistent_id();
  writer.integer(tensor.storage_offset);
  write_tuple(writer, tensor.sizes);
  write_tuple(writer, tensor.strides);
  writer.boolean(tensor.requires_grad);
  write_hooks(writer);
  if (!is_typed) writer.interned_global("torch", dtype_name(tensor.dtype));
  writer.tuple_from_mark();
  writer.memoize();
  reduce(writer);
}

ArchiveLayout::ArchiveLayout(const std::string& prefix, Bytes data_pkl, const std::vector<Storage>& storages) {
  if (!is_plain_name(prefix)) {
    fail(ErrorCode::invalid_argument, "torch.save: the folder '{}' of an archive, expected {}", printable(prefix),
         kPlainName);
  }
  // PyTorch's id is 20 digits of a hash of the names and 20 of the checksums. Ours hashes the data known here.
  std::uint64_t sizes_hash = fnv1a(as_bytes(prefix));
  for (const Storage& storage : storages) {
    sizes_hash = fnv1a(as_bytes(fmt::format("{}:{}\n", storage.key, storage.size_bytes)), sizes_hash);
  }
  const std::string id = fmt::format("{:020}{:020}", sizes_hash, fnv1a(data_pkl));
  const auto add_known = [&](std::vector<Known>& entries, std::string_view name, Bytes bytes) {
    const std::size_t index = layout_.add(fmt::format("{}/{}", prefix, name), bytes.size());
    const std::uint32_t crc = crc32(bytes);
    entries.push_back({index, std::move(bytes), crc});
  };
  const auto to_bytes = [](std::string_view text) {
    const ByteView view = as_bytes(text);
    return Bytes(view.begin(), view.end());
  };
  add_known(head_, kPickleName, std::move(data_pkl));
  add_known(head_, kByteOrderName, to_bytes("little"));
  first_storage_ = layout_.size();
  for (const Storage& storage : storages) {
    const std::string& key = storage.key;
    if (!is_plain_name(key)) {
      fail(ErrorCode::invalid_argument, "torch.save: the storage key '{}', expected {}", printable(key), kPlainName);
    }
    layout_.add(fmt::format("{}{}{}", prefix, kStorageFolder, key), storage.size_bytes);
  }
  storage_count_ = storages.size();
  add_known(tail_, kVersionName, to_bytes("3\n"));
  add_known(tail_, kIdName, to_bytes(id));
}

std::uint64_t ArchiveLayout::storage_offset_bytes(std::size_t i) const {
  return layout_.data_offset_bytes(first_storage_ + i);
}

std::uint64_t ArchiveLayout::storage_size_bytes(std::size_t i) const {
  return layout_.descriptor_offset_bytes(first_storage_ + i) - storage_offset_bytes(i);
}

void ArchiveLayout::append_known(Bytes& out, const std::vector<Known>& entries) const {
  for (const Known& entry : entries) {
    append(out, layout_.header(entry.index));
    append(out, entry.bytes);
    append(out, layout_.descriptor(entry.index, entry.crc32));
  }
}

Bytes ArchiveLayout::before_storage(std::size_t i, const std::vector<std::uint32_t>& crcs) const {
  Bytes out;
  if (i == 0) {
    append_known(out, head_);
  } else {
    out = layout_.descriptor(first_storage_ + i - 1, crcs.at(i - 1));
  }
  append(out, layout_.header(first_storage_ + i));
  return out;
}

Bytes ArchiveLayout::trailer(const std::vector<std::uint32_t>& crcs) const {
  if (crcs.size() != storage_count_) {
    fail(ErrorCode::invalid_argument, "torch.save: {} checksums, expected {} (one per storage)", crcs.size(),
         storage_count_);
  }
  Bytes out;
  if (storage_count_ == 0) {
    append_known(out, head_);
  } else {
    out = layout_.descriptor(first_storage_ + storage_count_ - 1, crcs.back());
  }
  append_known(out, tail_);
  std::vector<std::uint32_t> all(layout_.size());
  for (const std::vector<Known>* entries : {&head_, &tail_}) {
    for (const Known& entry : *entries) all[entry.index] = entry.crc32;
  }
  std::copy(crcs.begin(), crcs.end(), all.begin() + static_cast<std::ptrdiff_t>(first_storage_));
  append(out, layout_.directory(all));
  return out;
}

}  // namespace tessera::torch_archive
