#pragma once
// The index of a checkpoint whose tensors are in several files: "<name>.index.json", which lists the file of each
// tensor.

#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/format/safetensors.h"

namespace tessera::checkpoint {

class SourceBackend;

// Returns the directory of the checkpoint at `path`: `path` itself, or that of an index, which stands for its
// directory. Returns nothing for a single file.
std::optional<std::filesystem::path> checkpoint_directory(const std::filesystem::path& path);

// Returns the format of the files that an index with this name lists, or nothing if it is not the name of an index.
std::optional<SourceKind> index_kind(std::string_view name);

// Returns the name of the index of a format among the files of a directory: `preferred` if it is there, else the only
// one; nothing if there is none. Throws Error(invalid_argument) if there are several others.
std::optional<std::string> find_index(const std::vector<std::string>& names, SourceKind kind,
                                      std::string_view preferred, const std::string& directory);

// Files that names such as "model-00001-of-00003.safetensors" announce, at least one of each set that has not all.
struct MissingShards {
  // Their writer counted the files that it writes: the save was never completed, or they were lost.
  std::set<std::string> lost;
  // No rank has one, which would have "shard-<rank>-" before its name. PyTorch's HuggingFace writer takes the count
  // from a mapping of names to files, which may have tensors that the state does not, and a rank writes the files in
  // which it has tensors (PyTorch: torch/distributed/checkpoint/hf_storage.py, `write_data`).
  std::set<std::string> lost_or_never_written;
};
// Returns those that are not among `names`.
MissingShards missing_shards(const std::vector<std::string>& names);

class ShardIndex {
 public:
  // Reads an index in the storage of `source`, which must outlive it, and adds it to its description files. Throws
  // MissingFiles, and Error(corrupt).
  ShardIndex(SourceBackend& source, std::string name);

  // The files that it lists.
  const std::set<std::string>& files() const { return files_; }
  // Throws Error(corrupt) unless the source has the tensors that it lists, in the files that it lists, and no others.
  void check() const;

 private:
  bool has_file(const std::string& name) const;

  SourceBackend& source_;
  std::string name_;
  safetensors::Index index_;
  std::set<std::string> files_;
};

}  // namespace tessera::checkpoint
