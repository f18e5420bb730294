#pragma once
/// \file
/// torch.save archives: a zip with a pickle (`data.pkl`) whose tensors refer to storages (`data/<key>`).
/// See docs/formats/torch_archive.md. Source: torch/serialization.py, torch/_utils.py,
/// torch/_weights_only_unpickler.py.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/base/file.h"
#include "tessera/format/pickle_reader.h"
#include "tessera/format/pickle_value.h"
#include "tessera/format/pickle_writer.h"
#include "tessera/format/zip.h"

namespace tessera::torch_archive {

/// A persistent id `('storage', torch.FloatStorage, key, location, numel)`.
struct StorageRef {
  std::string key;
  std::string location;        ///< "cpu", "cuda:0", ...
  std::optional<DType> dtype;  ///< nothing for UntypedStorage
  std::int64_t size_bytes = 0;
};

/// A tensor as `_rebuild_tensor_v2` or `_rebuild_tensor_v3` (or `_rebuild_parameter` and the like around one) describes
/// it. Laws of one that `as_tensor` returned: sizes, strides and offset are not negative; `sizes` and `strides` are
/// equally long; every element lies inside of the storage; the product of the sizes (0 taken as 1) times the size of an
/// element, and `storage_offset + sum((size - 1) * stride)` times it, fit into an int64. An empty tensor's offset lies
/// inside of the storage too (PyTorch allows any; one behind the storage is given as 0).
struct TensorRef {
  DType dtype = DType::float32;
  StorageRef storage;
  std::int64_t storage_offset = 0;  ///< elements
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;  ///< elements
  bool requires_grad = false;
  bool is_parameter = false;
};

/// Whether `value` is a call that makes a tensor of any kind (sparse, quantized, subclass, meta, ... included).
bool is_tensor_like(pickle::NodeRef value);

/// The tensor that `value` describes; nothing if it describes no strided tensor over one storage whose bytes are its
/// values (sparse, quantized, a subclass, a conjugated view, ...). Attributes of a tensor or parameter are passed over.
/// Throws `Error(corrupt)` for one that is malformed: wrong types, negative sizes, elements outside of the storage.
std::optional<TensorRef> as_tensor(pickle::NodeRef value);

/// The storage that a persistent id names; nothing if it is of another form or class. Throws `Error(corrupt)` for a
/// storage that is malformed.
std::optional<StorageRef> as_storage(pickle::NodeRef persistent_id);

/// A torch.save archive that is part of a source. Nothing but the directory, `data.pkl` and the small entries is read.
struct Archive {
  std::string prefix;  ///< the top folder, without the slash
  zip::Directory directory;
  pickle::Tree tree;  ///< of data.pkl; root is what was saved
  std::string byte_order = "little";
  int version = 0;   ///< of the archive's format; PyTorch 1.6 to 2.14 write 3
  std::string name;  ///< of the source, for messages

  /// The entry of a storage. Throws `Error(corrupt)` when there is none or it is smaller than `storage.size_bytes`.
  const zip::Entry& storage_entry(const StorageRef& storage) const;
};

struct OpenLimits {
  std::uint64_t pickle_bytes = 512ull << 20;
  pickle::ReadLimits pickle;
};

/// Opens the archive that is the `length_bytes` at `offset_bytes` of `source`; checks the CRC-32 of data.pkl and the
/// small entries. A pre-1.6 file (a bare pickle with torch's magic number), a TorchScript archive (constants.pkl),
/// another zip and big-endian data are `Error(unsupported)` saying so.
Archive open(const ByteSource& source, std::uint64_t offset_bytes, std::uint64_t length_bytes,
             const OpenLimits& limits = {});

/// Whether the file begins like a pre-1.6 torch.save file.
bool looks_like_legacy(ByteView first_bytes);

/// Name of the storage class of a dtype in a typed persistent id ("FloatStorage"); nothing for those that need
/// `_rebuild_tensor_v3`. Law: `dtype_of_storage_class(*storage_class(d)) == d` where there is one.
std::optional<std::string_view> storage_class(DType dtype);
std::optional<DType> dtype_of_storage_class(std::string_view name);

/// Writes a call that rebuilds `tensor` (its storage by key) onto a data.pkl: v2 where the dtype has a storage class,
/// else v3. Law: a `Writer` of protocol 2 gets the bytes that torch.save writes for this tensor. The storage's class is
/// that of `tensor.dtype`; PyTorch can't load two tensors of different dtypes on one key. Quantized dtypes are
/// `Error(unsupported)`.
void write_tensor(pickle::Writer& writer, const TensorRef& tensor);
/// Writes a storage's persistent id tuple (without BINPERSID). A dtype without a storage class is `Error(unsupported)`.
void write_storage_id(pickle::Writer& writer, const StorageRef& storage);

/// Where everything lies in an archive that is to be written: data.pkl, byteorder, storages `data/<key>` in the order
/// given, version, serialization_id, as PyTorch 2.6 has it; about 1 KiB beside pickle and storages. All but the
/// storages' bytes is known beforehand; see zip::Layout. (`.format_version`, of 2.7 and later, is left out: it promises
/// that the storages' order is that of the pickle and that keys begin at 0, which is the caller's choice here.)
class ArchiveLayout {
 public:
  struct Storage {
    std::string key;
    std::uint64_t size_bytes = 0;
  };
  /// \param prefix "archive" for a stored item, the file's stem for a file, as PyTorch has it.
  ArchiveLayout(const std::string& prefix, Bytes data_pkl, const std::vector<Storage>& storages);

  std::uint64_t total_bytes() const { return layout_.total_bytes(); }
  std::uint64_t storage_offset_bytes(std::size_t i) const;
  std::uint64_t storage_size_bytes(std::size_t i) const;
  std::size_t storages() const { return storage_count_; }

  /// The bytes before the data of storage i, from the end of the data of storage i-1 (or the beginning of the archive):
  /// the descriptor of what precedes, small entries, the header. Of `crcs`, those of the storages, only `crcs[i - 1]`
  /// is looked at, so that a stream can be written as its checksums become known.
  Bytes before_storage(std::size_t i, const std::vector<std::uint32_t>& crcs) const;
  /// The bytes behind the last storage's data to the end of the archive. `crcs` are those of all storages. For an
  /// archive without storages, the whole of it.
  Bytes trailer(const std::vector<std::uint32_t>& crcs) const;

 private:
  struct Known {
    std::size_t index = 0;  // in the layout
    Bytes bytes;
    std::uint32_t crc32 = 0;
  };
  void append_known(Bytes& out, const std::vector<Known>& entries) const;

  zip::Layout layout_;
  std::vector<Known> head_, tail_;  // the entries before and behind the storages
  std::size_t first_storage_ = 0;   // index of the first storage in the layout
  std::size_t storage_count_ = 0;
};

}  // namespace tessera::torch_archive
