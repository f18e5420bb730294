#pragma once
/// \file
/// A checkpoint of any supported format: named tensors, each a list of stored chunks, and named objects.
///
/// Opening a checkpoint reads its description (`.metadata`, safetensors headers, `data.pkl`) but no tensor data. What
/// is read is compared with the sidecar, if there is one (see sidecar.h). A `Checkpoint` is immutable once opened. All
/// members are thread-safe. The files must not change while it is open.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/cancellation.h"
#include "tessera/base/dtype.h"
#include "tessera/base/file.h"
#include "tessera/base/state_path.h"
#include "tessera/format/pickle_value.h"
#include "tessera/format/torch_archive.h"
#include "tessera/layout/box.h"

namespace tessera::dcp {
struct Metadata;
}

namespace tessera::checkpoint {

/// The format of a checkpoint.
enum class SourceKind : std::uint8_t {
  dcp,          ///< a directory with `.metadata`, or with one `__<rank>.metadata` per rank
  safetensors,  ///< one file, or a directory of files with or without an index
  torch,        ///< one torch.save file, or a directory of files with an index
  /// A directory with `metadata.pkl` or files `<item>_<rank>.pt`, as Meta's torch_checkpointing saves it.
  torch_checkpointing,
};
/// Returns "dcp", "safetensors", "torch" or "torch_checkpointing".
std::string_view source_kind_name(SourceKind kind);

struct SourceFile {
  std::string name;  ///< relative to the checkpoint's directory; the file's own name if the checkpoint is one file
  std::optional<std::uint64_t> size_bytes;  ///< empty if the file is missing
  std::optional<std::int64_t> rank;         ///< the rank that saved it, if the format has ranks
};

/// The bytes of one stored chunk or object: [offset_bytes, offset_bytes + length_bytes) of a file. In a DCP checkpoint
/// they are a torch.save archive, in other formats the elements themselves.
struct StoredRange {
  static constexpr std::uint32_t kNoFile = UINT32_MAX;
  std::uint32_t file = kNoFile;  ///< index into Checkpoint::files(); kNoFile if the location is not recorded
  std::uint64_t offset_bytes = 0;
  std::uint64_t length_bytes = 0;
};

/// A dict key in a pickle that is not a str, such as an int. In PyTorch's names and paths, its text is its `repr` in
/// Python.
struct PathKey {
  std::size_t part = 0;  ///< index in the path
  /// The key as lossless JSON (see docs/formats/objects.md): `0`, `true`, `{"__tessera__":"tuple","items":[1,2]}`.
  /// Empty if the key is not understood.
  std::string json;
};
using PathKeys = std::vector<PathKey>;  ///< in order of parts

struct TensorInfo {
  std::string name;
  DType dtype = DType::float32;
  bool requires_grad = false;
  std::vector<std::int64_t> shape;
  BoxList chunks;                                  ///< not validated when the checkpoint is opened: see check_partition
  std::vector<StoredRange> stored;                 ///< stored[i] holds chunks[i]
  Path path;                                       ///< in the nested state dict; empty if not recorded
  std::size_t position = 0;                        ///< among all tensors and objects, in the checkpoint's order
  std::shared_ptr<const PathKeys> keys = nullptr;  ///< the keys on `path` that are not str; null if there are none
  /// Returns the size of all elements. Throws `Error` if it overflows.
  std::uint64_t size_bytes() const;
};

struct ObjectInfo {
  std::string name;
  StoredRange stored;  ///< kNoFile if the object is part of a larger pickle or of a header
  Path path;
  std::size_t position = 0;
  std::shared_ptr<const PathKeys> keys = nullptr;  ///< as for a tensor
};

/// A redundant copy of a chunk or an object. Ranks that save without collectives each store replicated values; the
/// checkpoint's state uses the copy of the lowest rank.
struct StoredCopy {
  std::string name;  ///< of the tensor or object
  StoredRange stored;
};

/// The location of a chunk's elements: element x is at offset_bytes + sum(x[d] * strides[d]) * element size.
struct Extent {
  std::uint32_t file = 0;  ///< for Checkpoint::open_file; not in Checkpoint::files() if the item has transforms
  std::uint64_t offset_bytes = 0;
  std::uint64_t length_bytes = 0;     ///< from the first element to the end of the last; 0 if there are no elements
  std::vector<std::int64_t> strides;  ///< in elements; empty for row-major
  /// The format's CRC-32 of [offset_bytes, offset_bytes + length_bytes): the storage that contains the chunk, which may
  /// be larger than the chunk.
  struct Checksum {
    std::uint64_t offset_bytes = 0, length_bytes = 0;
    std::uint32_t crc32 = 0;
  };
  std::optional<Checksum> checksum;  ///< empty if the format has none
};

/// A loaded object and the storages that it refers to.
struct ObjectValue {
  std::shared_ptr<const pickle::Tree> tree;  ///< owns `value`
  pickle::NodeRef value;
  /// Locations of the storages that persistent ids within `value` name (tensors inside the object), by key.
  struct Storage {
    std::uint32_t file = 0;
    zip::Entry entry;
  };
  std::map<std::string, Storage> storages;
};

/// What a program does with a loaded object.
enum class ObjectUse : std::uint8_t {
  any,
  copy,  ///< visits each part of it once, as a copy to another pickle does, and makes neither text nor JSON of it
};

class SourceBackend;
class Storage;
class TensorReader;
class TransformRegistry;  // tessera/checkpoint/transform.h
struct Sidecar;

struct OpenOptions {
  std::uint64_t max_metadata_bytes = 8ull << 30;  ///< largest accepted `.metadata` or data.pkl
  /// If not null, read instead of the directory's `.metadata`.
  std::shared_ptr<const ByteSource> metadata;
  /// Whether to compare what is read with the sidecar, if there is one.
  bool check_checksums = true;
  /// If not null, used instead of the sidecar in the storage.
  std::shared_ptr<const Sidecar> sidecar;
  /// The transforms of stored items that can be undone; null for those of a new TransformRegistry.
  std::shared_ptr<const TransformRegistry> transforms;
};

class Checkpoint {
 public:
  /// Detects the format of `path` and reads its description. Throws `Error`: not_found if `path` does not exist or is a
  /// directory without a checkpoint; invalid_argument for a file inside a DCP directory; unsupported for a torch.save
  /// file from before PyTorch 1.6, a TorchScript file, a checkpoint of another framework, ...; corrupt; io. An index
  /// (`*.index.json`) stands for its directory.
  static std::shared_ptr<const Checkpoint> open(const std::filesystem::path& path, const OpenOptions& options = {});
  /// Opens the checkpoint directory that `storage` holds.
  static std::shared_ptr<const Checkpoint> open(const std::shared_ptr<const Storage>& storage,
                                                const OpenOptions& options = {});
  ~Checkpoint();
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  const std::filesystem::path& path() const;
  SourceKind kind() const;
  /// Returns the format's version as text for users: "PyTorch 1.13", "PyTorch 2.x", "1.0.0", "safetensors", "torch.save
  /// 3".
  const std::string& version() const;

  const std::vector<SourceFile>& files() const;  ///< the files that hold data
  /// Returns the names of the checkpoint's other files, which describe it: `.metadata`, an index. Not the sidecar.
  const std::vector<std::string>& description_files() const;
  const std::vector<TensorInfo>& tensors() const;  ///< in the checkpoint's order, names unique
  const std::vector<ObjectInfo>& objects() const;
  const std::vector<StoredCopy>& copies() const;  ///< redundant copies, which are not part of the state
  /// Returns the size of all tensors' elements.
  std::uint64_t tensor_bytes() const;
  /// Returns the metadata as read, except that chunks were moved from its entries to `tensors()`. Null unless the kind
  /// is dcp.
  const dcp::Metadata* dcp_metadata() const;
  /// Returns the text that safetensors files have under `__metadata__`, except for the keys of DCP and of tessera. If
  /// files of one checkpoint differ in a key, that of the first file counts, and `warnings()` names the key. Empty for
  /// other kinds.
  const std::map<std::string, std::string>& metadata() const;
  /// Returns warnings from opening, for users: for example ignored files.
  const std::vector<std::string>& warnings() const;

  /// Returns the index of a tensor or an object by name, or nothing if there is none.
  std::optional<std::size_t> find_tensor(std::string_view name) const;
  std::optional<std::size_t> find_object(std::string_view name) const;

  /// Throws `Error(corrupt)`, naming the tensor and the chunks, unless the chunks of tensor `i` partition its shape:
  /// each is inside the shape, no two overlap, and every element is covered.
  void check_partition(std::size_t i) const;

  /// Returns the location of a chunk's elements. For a DCP chunk, reads the directory and the pickle of its archive,
  /// and throws `Error(corrupt)` if dtype, shape or size differ from the metadata. Cost: one to three small reads.
  /// Throws `Error(unsupported)` if the tensor is computed.
  Extent locate(std::size_t tensor, std::size_t chunk) const;

  /// Returns whether the elements of tensor `i` are computed from those of stored tensors: this is a view (see
  /// tensor_map.h), and the map does more with the tensor than rename it. `stored` of its chunks then names the files
  /// that they mostly come from. Any tensor can be read with TensorReader.
  bool is_computed(std::size_t tensor) const;

  /// Returns the range of a stored item as it was before its transforms, for `open_file`: `stored` itself if it has
  /// none. Otherwise, its transforms are undone, and `file` is not in `files()`. The other functions that read a
  /// transformed item undo its transforms, too. Throws `Error(unsupported)` for a transform that is not registered, and
  /// `Error(corrupt)` if one cannot be undone, or if the item then has over 1 MiB more than twice the chunk's elements.
  StoredRange without_transforms(const StoredRange& stored) const;

  /// Loads an object. Throws `Error(corrupt)` if it is damaged, or if what the objects of this checkpoint share takes
  /// more than 64 MiB and 16 times the files (see docs/formats/pickle.md): the same stored bytes of dcp, and, unless it
  /// is copied, parts that occur several times within an object. For parts that several objects share, `open` throws.
  ObjectValue load_object(std::size_t i, ObjectUse use = ObjectUse::any) const;

  /// Opens a file for reading. Few files are kept open, so release the pointer early. Throws `Error(not_found)` if the
  /// file is missing.
  std::shared_ptr<const ByteSource> open_file(std::uint32_t file) const;

  /// Returns whether reads are compared with a sidecar. A read throws `Error(corrupt)` if a block of the sidecar that
  /// it covers completely differs. A block that it covers in part is compared too, unless the read is one of many with
  /// gaps between them or the sidecar is of version 1, which has one block per file.
  bool has_sidecar() const;
  /// Returns the size of the largest block of the sidecar, which may have to be read to compare a small part of a file:
  /// 128 KiB if tessera wrote it, and the size of the largest file if it is of version 1. Returns 0 without a sidecar.
  std::uint64_t largest_block_bytes() const;
  /// Returns the size of the blocks that were read in part and not compared with the sidecar.
  std::uint64_t bytes_not_compared() const;
  /// Reads and compares these blocks. Then every byte that was read has been compared. Throws `Error(corrupt)`, and
  /// `Error(cancelled)` between blocks.
  void compare_rest(const Cancellation* cancellation = nullptr) const;

 private:
  friend class TensorReader;
  friend struct CheckpointAccess;  // of tessera's own sources
  static std::shared_ptr<const Checkpoint> made(std::unique_ptr<SourceBackend> backend);
  explicit Checkpoint(std::unique_ptr<SourceBackend> backend);
  std::unique_ptr<SourceBackend> backend_;
};

}  // namespace tessera::checkpoint
