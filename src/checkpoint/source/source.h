#pragma once
// The implementation of a Checkpoint: one backend per source kind.

#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/source/checksums.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/base/internal/name_index.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/storage.h"

namespace tessera::checkpoint {

// Keeps up to kOpenFiles files open and closes the one opened first. Thread-safe.
class FileCache {
 public:
  std::shared_ptr<const ByteSource> open(std::uint32_t key, FunctionRef<std::shared_ptr<const ByteSource>()> open);

 private:
  static constexpr std::size_t kOpenFiles = 64;
  std::mutex mutex_;
  std::unordered_map<std::uint32_t, std::shared_ptr<const ByteSource>> files_;
  std::deque<std::uint32_t> order_;
};

// Files that the description of a checkpoint names and that are not there.
class MissingFiles : public Error {
 public:
  using NamesOfFile = std::map<std::string, std::vector<std::string>>;  // the tensors in each missing file
  // `what` is the checkpoint that names them, for the message.
  MissingFiles(std::string_view what, NamesOfFile files);
  const NamesOfFile& files() const { return files_; }

 private:
  NamesOfFile files_;
};

class ComputedTensors;    // checkpoint/source/mapped.h
struct StateBudgets;      // checkpoint/source/expansion.h
class RepeatedInObjects;  // checkpoint/source/expansion.h

class SourceBackend {
 public:
  // Reads are compared with `sidecar`, if there is one.
  SourceBackend(std::filesystem::path path_in, std::shared_ptr<const Storage> storage_in,
                std::optional<Sidecar> sidecar)
      : path(std::move(path_in)), storage(std::move(storage_in)), checksums(std::move(sidecar)) {}
  virtual ~SourceBackend() = default;
  virtual Extent locate(std::size_t tensor, std::size_t chunk) const = 0;
  virtual ObjectValue load_object(std::size_t i) const = 0;  // as for ObjectUse::copy
  virtual const dcp::Metadata* dcp_metadata() const { return nullptr; }
  virtual StoredRange without_transforms(const StoredRange& stored) const { return stored; }
  // What the tensors are computed from; null if they are stored.
  virtual const ComputedTensors* computed() const { return nullptr; }
  virtual bool has_sidecar() const { return checksums.has_sidecar(); }
  virtual std::uint64_t largest_block_bytes() const { return checksums.largest_block_bytes(); }
  virtual std::uint64_t bytes_not_compared() const { return checksums.bytes_not_compared(); }
  virtual void compare_rest(const Cancellation* cancellation) const;

  // Files from this number on are items whose transforms are undone.
  static constexpr std::uint32_t kPlainItems = std::uint32_t{1} << 31;
  virtual std::shared_ptr<const ByteSource> open_file(std::uint32_t file) const;
  // Opens a file by name, for one use. Its reads are compared with the sidecar.
  std::shared_ptr<const ByteSource> open_name(const std::string& name) const;
  // Adds a file of the checkpoint's directory, which need not exist, and returns its index. Throws Error(corrupt) for a
  // name that leaves the directory.
  std::uint32_t add_file(const std::string& name);
  // Fills the indices by name, and `repeated_in_objects`. Throws Error(corrupt) if a name occurs twice.
  void finish();

  std::filesystem::path path;              // as the user gave it
  std::shared_ptr<const Storage> storage;  // of the files
  Checksums checksums;
  SourceKind kind = SourceKind::dcp;
  std::string version;
  std::vector<SourceFile> files;
  std::vector<std::string> description_files;  // files of the checkpoint without data: `.metadata`, an index
  std::vector<TensorInfo> tensors;
  std::vector<ObjectInfo> objects;
  std::vector<StoredCopy> copies;
  std::vector<std::string> warnings;
  std::map<std::string, std::string> metadata;  // of safetensors
  NameIndex tensor_index, object_index;
  // Null for one object: whatever walks through it has limits for it alone, and it may be large.
  std::shared_ptr<RepeatedInObjects> repeated_in_objects;

 protected:
  virtual std::shared_ptr<const ByteSource> open_plain_item(std::uint32_t number) const;

 private:
  mutable FileCache cache_;
};

// Makes checkpoints of backends.
struct CheckpointAccess {
  static std::shared_ptr<const Checkpoint> make(std::unique_ptr<SourceBackend> backend) {
    return std::shared_ptr<const Checkpoint>(new Checkpoint(std::move(backend)));
  }
};

std::unique_ptr<SourceBackend> open_dcp(std::shared_ptr<const Storage> storage, const OpenOptions& options);
// `index` is the name of the index in the directory; empty if it has none.
std::unique_ptr<SourceBackend> open_safetensors_directory(const std::shared_ptr<const Storage>& storage,
                                                          const OpenOptions& options, const std::string& index);
std::unique_ptr<SourceBackend> open_torch_directory(const std::shared_ptr<const Storage>& storage,
                                                    const OpenOptions& options, const std::string& index);
std::unique_ptr<SourceBackend> open_safetensors_file(const std::filesystem::path& file, const OpenOptions& options);
std::unique_ptr<SourceBackend> open_torch_file(const std::filesystem::path& file, const OpenOptions& options);
// Opens a file of a checkpoint of several. Reads are compared with the sidecar of `storage`.
std::unique_ptr<SourceBackend> open_torch_file(const std::shared_ptr<const Storage>& storage, const std::string& name,
                                               const OpenOptions& options, StateBudgets& budgets);

std::unique_ptr<SourceBackend> open_torch_checkpointing(const std::shared_ptr<const Storage>& storage,
                                                        const OpenOptions& options);

// Returns the sidecar to compare reads with, or nothing.
std::optional<Sidecar> sidecar_of(const Storage& storage, const OpenOptions& options);
std::optional<Sidecar> sidecar_of(const std::filesystem::path& file, const OpenOptions& options);

// Returns the format of the checkpoint in a directory, complete or not; nothing if it has none.
std::optional<SourceKind> directory_kind(const Storage& storage);

// Whether `storage` has `.metadata` or a `__<rank>.metadata`.
bool is_dcp(const Storage& storage);
// Whether a name is that of a file of rank 0, as torch_checkpointing names it, and of no step of a run.
bool is_torch_checkpointing_file(const std::string& name);

// Returns the storages that persistent ids within `value` name, by key. Throws Error without the place.
std::map<std::string, ObjectValue::Storage> storages_of(pickle::NodeRef value, const torch_archive::Archive& archive,
                                                        std::uint32_t file);

// Returns the extent of a tensor whose storage is an entry of a torch.save archive in `file`.
Extent extent_of(const torch_archive::TensorRef& tensor, const zip::Entry& storage, std::uint32_t file);

}  // namespace tessera::checkpoint
