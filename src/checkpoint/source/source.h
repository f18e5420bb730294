#pragma once
// The implementation of a Checkpoint: one backend per source kind.

#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/storage.h"

namespace tessera::checkpoint {

// Keeps up to kOpenFiles files open and closes the one opened first. Thread-safe.
class FileCache {
 public:
  std::shared_ptr<const ByteSource> open(const Storage& storage, const std::string& name, std::uint32_t key);

 private:
  static constexpr std::size_t kOpenFiles = 64;
  std::mutex mutex_;
  std::unordered_map<std::uint32_t, std::shared_ptr<const ByteSource>> files_;
  std::deque<std::uint32_t> order_;
};

class SourceBackend {
 public:
  virtual ~SourceBackend() = default;
  virtual Extent locate(std::size_t tensor, std::size_t chunk) const = 0;
  virtual ObjectValue load_object(std::size_t i) const = 0;
  virtual const dcp::Metadata* dcp_metadata() const { return nullptr; }

  std::shared_ptr<const ByteSource> open_file(std::uint32_t file) const;
  // Adds a file of the checkpoint's directory, which need not exist, and returns its index. Throws Error(corrupt) for a
  // name that leaves the directory.
  std::uint32_t add_file(const std::string& name);
  // Fills the indices by name. Throws Error(corrupt) if a name occurs twice.
  void finish();

  std::filesystem::path path;              // as the user gave it
  std::shared_ptr<const Storage> storage;  // of the files
  SourceKind kind = SourceKind::dcp;
  std::string version;
  std::vector<SourceFile> files;
  std::vector<TensorInfo> tensors;
  std::vector<ObjectInfo> objects;
  std::vector<StoredCopy> copies;
  std::vector<std::string> warnings;
  std::unordered_map<std::string_view, std::size_t> tensor_index, object_index;

 private:
  mutable FileCache cache_;
};

std::unique_ptr<SourceBackend> open_dcp(std::shared_ptr<const Storage> storage, const OpenOptions& options);
std::unique_ptr<SourceBackend> open_safetensors_directory(const std::shared_ptr<const Storage>& storage);
std::unique_ptr<SourceBackend> open_safetensors_file(const std::filesystem::path& file);
std::unique_ptr<SourceBackend> open_torch_file(const std::filesystem::path& file, const OpenOptions& options);

// Whether `storage` has `.metadata` or a `__<rank>.metadata`.
bool is_dcp(const Storage& storage);

// Returns the storages that persistent ids within `value` name, by key.
std::map<std::string, ObjectValue::Storage> storages_of(pickle::NodeRef value, const torch_archive::Archive& archive,
                                                        std::uint32_t file);

// Returns the extent of a tensor whose storage is an entry of a torch.save archive in `file`.
Extent extent_of(const torch_archive::TensorRef& tensor, const zip::Entry& storage, std::uint32_t file);

}  // namespace tessera::checkpoint
