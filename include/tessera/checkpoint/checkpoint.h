#pragma once
/// \file
/// A checkpoint on disk, whatever its format, as a named set of tensors made of boxes and of objects.
///
/// Opening reads what describes the state (`.metadata`, a safetensors header, `data.pkl`) and no tensor data. A
/// `Checkpoint` never changes after it was opened; all members may be called by several threads at once. The files must
/// not be changed meanwhile.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

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

enum class SourceKind : std::uint8_t {
  dcp,          ///< a directory with `.metadata`, or with one `__<rank>.metadata` for each rank
  safetensors,  ///< one file, or a directory of them with or without an index
  torch,        ///< one torch.save file
};
std::string_view source_kind_name(SourceKind kind);  ///< "dcp", "safetensors", "torch"

struct SourceFile {
  std::string name;  ///< relative to the checkpoint's directory; the file's own name where the checkpoint is one file
  std::optional<std::uint64_t> size_bytes;  ///< nothing if it isn't there
};

/// One stored chunk: `length_bytes` at `offset_bytes` of a file. In a DCP checkpoint that is the torch.save archive of
/// the chunk, else the elements themselves.
struct StoredRange {
  static constexpr std::uint32_t kNoFile = UINT32_MAX;
  std::uint32_t file = kNoFile;  ///< into Checkpoint::files(); kNoFile: the checkpoint doesn't say where it is
  std::uint64_t offset_bytes = 0;
  std::uint64_t length_bytes = 0;
};

struct TensorInfo {
  std::string name;
  DType dtype = DType::float32;
  bool requires_grad = false;
  std::vector<std::int64_t> shape;
  BoxList chunks;                    ///< not checked against the shape nor each other: see check_partition
  std::vector<StoredRange> stored;   ///< of chunk i
  Path path;                         ///< in the nested state dict; empty where the checkpoint doesn't tell
  std::size_t position = 0;          ///< among all tensors and objects, in the checkpoint's order
  std::uint64_t size_bytes() const;  ///< of the elements
};

struct ObjectInfo {
  std::string name;
  StoredRange stored;  ///< kNoFile where it is no range of its own (a value in a larger pickle or a header)
  Path path;
  std::size_t position = 0;
};

/// One more stored copy of a chunk or an object: ranks that save without collectives each save what is replicated. The
/// state is made of the copy of the lowest rank that has one.
struct StoredCopy {
  std::string name;  ///< of the tensor or object
  StoredRange stored;
};

/// Where the elements of a chunk lie: element x is at offset_bytes + sum(x[d] * strides[d]) * element size.
struct Extent {
  std::uint32_t file = 0;
  std::uint64_t offset_bytes = 0;
  std::uint64_t length_bytes = 0;     ///< from the first element's first byte to the last one's end; 0 for no element
  std::vector<std::int64_t> strides;  ///< elements; empty: row-major
  /// A CRC-32 that the format has of `length_bytes` at `offset_bytes` (of the whole storage, which may be larger than
  /// the chunk).
  struct Checksum {
    std::uint64_t offset_bytes = 0, length_bytes = 0;
    std::uint32_t crc32 = 0;
  };
  std::optional<Checksum> checksum;
};

/// A loaded object and what it refers to.
struct ObjectValue {
  std::shared_ptr<const pickle::Tree> tree;  ///< owns `value`
  pickle::NodeRef value;
  /// Where the storages lie that persistent ids within `value` name (tensors inside of an object), by key.
  struct Storage {
    std::uint32_t file = 0;
    zip::Entry entry;
  };
  std::map<std::string, Storage> storages;
};

struct OpenOptions {
  std::uint64_t max_metadata_bytes = 8ull << 30;  ///< of a `.metadata` or a data.pkl
  /// Taken for the directory's `.metadata`, if given.
  std::shared_ptr<const ByteSource> metadata;
};

class SourceBackend;
class Storage;

class Checkpoint {
 public:
  /// Recognises what `path` is and reads its description. Throws `Error`: not_found if there is nothing there or
  /// nothing that is a checkpoint, corrupt, unsupported (a pre-1.6 torch.save file, TorchScript, ...), io.
  static std::shared_ptr<const Checkpoint> open(const std::filesystem::path& path, const OpenOptions& options = {});
  /// A directory's checkpoint, wherever its files are.
  static std::shared_ptr<const Checkpoint> open(const std::shared_ptr<const Storage>& storage,
                                                const OpenOptions& options = {});
  ~Checkpoint();
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  const std::filesystem::path& path() const;
  SourceKind kind() const;
  /// The format's version for people: "PyTorch 1.13", "PyTorch 2.x", "1.0.0", "safetensors", "torch.save 3".
  const std::string& version() const;

  const std::vector<SourceFile>& files() const;    ///< the files that hold data
  const std::vector<TensorInfo>& tensors() const;  ///< in the checkpoint's order, names unique
  const std::vector<ObjectInfo>& objects() const;
  const std::vector<StoredCopy>& copies() const;  ///< that are not part of the state
  /// Bytes of all tensors' elements.
  std::uint64_t tensor_bytes() const;
  /// The metadata as it was read, but for the chunks of its entries, which are those of `tensors()`; null for other
  /// kinds than dcp.
  const dcp::Metadata* dcp_metadata() const;
  /// What was left out or looks odd when opening, for the user.
  const std::vector<std::string>& warnings() const;

  /// Index of a tensor or an object by name.
  std::optional<std::size_t> find_tensor(std::string_view name) const;
  std::optional<std::size_t> find_object(std::string_view name) const;

  /// Throws `Error(corrupt)`, naming the tensor and the chunks, unless the chunks of tensor `i` lie in its shape, do
  /// not overlap and leave no hole.
  void check_partition(std::size_t i) const;

  /// Where the elements of a chunk lie. For a DCP chunk that reads the directory and the pickle of its archive, and
  /// throws `Error(corrupt)` if they disagree with the metadata in dtype, shape or size. Cost: one to three small
  /// reads.
  Extent locate(std::size_t tensor, std::size_t chunk) const;

  /// Loads an object; throws `Error(corrupt)` for a damaged one.
  ObjectValue load_object(std::size_t i) const;

  /// A file opened for reading; few are kept open, so hold the pointer no longer than needed. Throws not_found if it
  /// isn't there.
  std::shared_ptr<const ByteSource> open_file(std::uint32_t file) const;

 private:
  explicit Checkpoint(std::unique_ptr<SourceBackend> backend);
  std::unique_ptr<SourceBackend> backend_;
};

}  // namespace tessera::checkpoint
