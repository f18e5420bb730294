#pragma once
/// \file
/// Archives of torch.save: a zip with a pickle (`data.pkl`) whose tensors refer to storages (`data/<key>`).
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
#include "tessera/layout/placement.h"

namespace tessera::torch_archive {

/// A storage, from its persistent id `('storage', torch.FloatStorage, key, location, numel)`.
struct StorageRef {
  std::string key;
  std::string location;        ///< "cpu", "cuda:0", ...
  std::optional<DType> dtype;  ///< not set for UntypedStorage
  std::int64_t size_bytes = 0;
};

/// A tensor described by `_rebuild_tensor_v2` or `_rebuild_tensor_v3` (or by `_rebuild_parameter` and the like around
/// one of these). `as_tensor` guarantees: sizes, strides and offset are not negative; `sizes` and `strides` have the
/// same length; every element is inside of the storage; the product of the sizes (0 taken as 1), and `storage_offset +
/// sum((size - 1) * stride)`, each times the element size, fit into an int64. The offset of an empty tensor is inside
/// of the storage too (PyTorch allows any; an offset past the end is returned as 0).
struct TensorRef {
  DType dtype = DType::float32;
  StorageRef storage;
  std::int64_t storage_offset = 0;  ///< elements
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;  ///< elements
  bool requires_grad = false;
  bool is_parameter = false;
};

/// Returns whether `value` is a call that makes any kind of tensor, including sparse, quantized, subclass and meta
/// ones.
bool is_tensor_like(pickle::NodeRef value);

/// Returns the tensor that `value` describes. Returns nothing if it is not a strided tensor over one storage whose
/// bytes are its values (sparse, quantized, a subclass, a conjugated view, ...). Ignores attributes of a tensor or
/// parameter. Throws `Error(corrupt)` if it is malformed: wrong types, negative sizes, elements outside of the storage.
std::optional<TensorRef> as_tensor(pickle::NodeRef value);

/// A DTensor: the tensor that a rank saved of it, and how it is distributed.
struct DTensorRef {
  TensorRef local;
  std::vector<std::int64_t> shape;  ///< of the full tensor
  std::vector<std::int64_t> mesh_shape;
  std::vector<std::int64_t> coordinate;  ///< of the rank in the mesh
  Placements placements;                 ///< one per mesh dimension
};

/// Returns the DTensor that `value` describes, or nothing if it is not one. Throws `Error(unsupported)` for a kind of
/// placement, mesh or local tensor that is not known, naming its class, and `Error(corrupt)` if it is malformed.
std::optional<DTensorRef> as_dtensor(pickle::NodeRef value);
/// Returns the tensor that a rank saved of a DTensor, or nothing if `value` is not a DTensor. Throws as above, but does
/// not look at mesh and placements.
std::optional<TensorRef> as_local_tensor(pickle::NodeRef value);

/// Returns the storage that a persistent id names, or nothing if the id has another form or class. Throws
/// `Error(corrupt)` if the storage is malformed.
std::optional<StorageRef> as_storage(pickle::NodeRef persistent_id);

/// A torch.save archive inside of a source. Only the directory, `data.pkl` and the small entries have been read.
struct Archive {
  std::string prefix;  ///< the top folder, without the slash
  zip::Directory directory;
  pickle::Tree tree;  ///< of data.pkl; the root is the saved object
  std::string byte_order = "little";
  int version = 0;   ///< of the archive format; PyTorch 1.6 to 2.14 write 3
  std::string name;  ///< of the source, for messages

  /// Returns the entry of a storage. Throws `Error(corrupt)` if it is missing or smaller than `storage.size_bytes`.
  const zip::Entry& storage_entry(const StorageRef& storage) const;
};

struct OpenLimits {
  std::uint64_t pickle_bytes = 512ull << 20;
  pickle::ReadLimits pickle;
};

/// Opens the archive in the `length_bytes` at `offset_bytes` of `source`. Checks the CRC-32 of data.pkl and of the
/// small entries. Throws `Error(unsupported)` that names the case for a pre-1.6 file (a bare pickle with torch's magic
/// number), a TorchScript archive (constants.pkl), another zip, and big-endian data.
Archive open(const ByteSource& source, std::uint64_t offset_bytes, std::uint64_t length_bytes,
             const OpenLimits& limits = {});

/// Returns whether the file starts like a pre-1.6 torch.save file.
bool looks_like_legacy(ByteView first_bytes);

/// Returns the name of a dtype's storage class in a typed persistent id ("FloatStorage"), or nothing for dtypes that
/// need `_rebuild_tensor_v3`. Law: `dtype_of_storage_class(*storage_class(d)) == d` for every d that has one.
std::optional<std::string_view> storage_class(DType dtype);
std::optional<DType> dtype_of_storage_class(std::string_view name);

/// Writes a call that rebuilds `tensor` (referring to its storage by key) to a data.pkl: v2 if the dtype has a storage
/// class, otherwise v3. With protocol 2, these are the bytes that torch.save writes for this tensor. The storage gets
/// the class of `tensor.dtype`; PyTorch cannot load two tensors of different dtypes that share a key. Throws
/// `Error(unsupported)` for quantized dtypes.
void write_tensor(pickle::Writer& writer, const TensorRef& tensor);
/// Writes a storage's persistent id tuple, without BINPERSID. Throws `Error(unsupported)` for a dtype without a storage
/// class.
void write_storage_id(pickle::Writer& writer, const StorageRef& storage);

/// The layout of a new archive: data.pkl, byteorder, the storages `data/<key>` in the given order, version and
/// serialization_id, as PyTorch 2.6 writes them. This adds about 1 KiB to the pickle and the storages. Everything
/// except the storages' bytes is known beforehand; see zip::Layout. `.format_version` of PyTorch 2.7 and later is left
/// out: it promises that storages are ordered as in the pickle with keys from 0, which is the caller's choice here.
class ArchiveLayout {
 public:
  struct Storage {
    std::string key;
    std::uint64_t size_bytes = 0;
  };
  /// \param prefix "archive" for an item of a checkpoint, the file's stem for a file, as in PyTorch.
  ArchiveLayout(const std::string& prefix, Bytes data_pkl, const std::vector<Storage>& storages);

  std::uint64_t total_bytes() const { return layout_.total_bytes(); }
  std::uint64_t storage_offset_bytes(std::size_t i) const;
  std::uint64_t storage_size_bytes(std::size_t i) const;
  std::size_t storages() const { return storage_count_; }

  /// Returns the bytes between the data of storage i-1 (or the start of the archive) and the data of storage i: the
  /// descriptor of the previous entry, small entries, the header. Reads only `crcs[i - 1]` of the storages' checksums,
  /// so a stream can be written while they are computed.
  Bytes before_storage(std::size_t i, const std::vector<std::uint32_t>& crcs) const;
  /// Returns the bytes after the last storage's data to the end of the archive, or the complete archive if it has no
  /// storages. `crcs` has the checksums of all storages.
  Bytes trailer(const std::vector<std::uint32_t>& crcs) const;

 private:
  struct Known {
    std::size_t index = 0;  // in the layout
    Bytes bytes;
    std::uint32_t crc32 = 0;
  };
  void append_known(Bytes& out, const std::vector<Known>& entries) const;

  zip::Layout layout_;
  std::vector<Known> head_, tail_;  // the entries before and after the storages
  std::size_t first_storage_ = 0;   // index of the first storage in the layout
  std::size_t storage_count_ = 0;
};

}  // namespace tessera::torch_archive
