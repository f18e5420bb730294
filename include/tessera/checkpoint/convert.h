#pragma once
/// \file
/// Functions to convert a checkpoint to another format and to reshard it. Data is streamed: memory does not grow with
/// the state.
///
/// Law: the destination is either absent or a complete, synced checkpoint. Output is written to a temporary folder next
/// to the destination (`.<name>.tessera-....partial`), synced, and renamed. If anything throws, the folder is removed.
/// A folder left by a killed process is removed by the next conversion to the same destination.
///
/// Law: a key of a dict keeps its type if source and destination are pickles of states (torch, torch_checkpointing) and
/// the key is understood. Otherwise it becomes the text that PyTorch's names have: see docs/formats/torch_archive.md.
/// Exception: an int in the path of a tensor that torch_checkpointing stores in safetensors is an index of a list,
/// because `metadata.pkl` does not distinguish the two.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/cancellation.h"
#include "tessera/base/progress.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/rank_link.h"

namespace tessera::checkpoint {

/// A choice of tensors and objects by name. A name is selected if it matches any glob in `select`, or `select` is
/// empty, and matches none in `exclude`.
struct Selection {
  std::vector<std::string> select, exclude;
  bool takes(std::string_view name) const;
};
/// Throws `Error(invalid_argument)` if a glob of `select` matches no name of the checkpoints, or if nothing is
/// selected: a misspelt name must not pass for an empty state.
void check_selection(const Selection& selection, const std::vector<const Checkpoint*>& checkpoints);
/// Returns whether `glob` matches all of `text`: `*` matches any characters, `?` one, `[a-z]` and `[!a-z]` one inside
/// or outside a set.
bool glob_matches(std::string_view glob, std::string_view text);

struct ConvertReport {
  struct OutputFile {
    std::string name;
    std::uint64_t size_bytes = 0;
    std::uint64_t tensors = 0;  ///< tensors and chunks of tensors in it
  };
  std::uint64_t tensors = 0, objects = 0;
  std::uint64_t tensor_bytes = 0;  ///< size of the elements written
  std::vector<OutputFile> files;
  std::uint64_t file_bytes() const;
};

struct ConvertOptions {
  SourceKind to = SourceKind::dcp;
  Selection selection;
  std::optional<DType> dtype;  ///< floating-point tensors are cast to this
  /// Largest file, not counting headers; 0 for the format's default. A tensor, or a chunk in dcp, is never split, so
  /// one that is larger gets a file of its own.
  std::uint64_t max_shard_bytes = 0;
  /// For a directory of safetensors: the number of the file of each tensor, from 1, instead of a limit on the size of
  /// files. Every selected tensor and every file up to the last must be in it; other names are ignored. PyTorch:
  /// `fqn_to_index_mapping`.
  std::map<std::string, std::size_t> file_of_tensor;
  /// For a directory of safetensors, if not empty: the directory of a Hugging Face model, whose configuration and
  /// tokenizer files (see `hf_config_files`) are copied into the destination. The sidecar does not list them.
  std::filesystem::path hf_config;
  std::size_t jobs = 0;  ///< threads that read and write; 0: one per processor, at least 4, at most 16
  bool dry_run = false;  ///< plan and report, write nothing
  /// Whether a destination that exists is replaced, if it is a file, or a directory of a checkpoint without directories
  /// in it. At every instant the old one or the new one is there, complete; a file may lack its sidecar for an instant.
  bool replace = false;
  /// Whether tensors that store few elements and repeat them (`torch.Tensor.expand`) may make the state larger than the
  /// checkpoint's files by more than 64 MiB and by more than 16 times their size. If false, that is
  /// `Error(unsupported)`.
  bool expand = false;
  /// Receives what will be written, once it is planned and before anything is; with several ranks, on the coordinator.
  /// What it throws ends the conversion.
  std::function<void(const ConvertReport&)> before_writing;
  ProgressSink* progress = nullptr;
  const Cancellation* cancellation = nullptr;
  std::function<void(const std::string&)> warn;  ///< receives what could not be carried over, by name
};

/// The file of a Hugging Face model that specifies its architecture.
inline constexpr std::string_view kHfConfigFileName = "config.json";
/// Returns the names of the configuration and tokenizer files in the directory of a Hugging Face model, sorted:
/// config.json, generation_config.json, preprocessor_config.json, added_tokens.json, special_tokens_map.json,
/// merges.txt, tokenizer*, vocab*, chat_template*. Throws `Error(not_found)` if there is no config.json.
std::vector<std::string> hf_config_files(const std::filesystem::path& directory);

/// Converts `source` to format `options.to` at `destination`, which must not exist unless `options.replace`. The
/// destination is a directory for dcp and torch_checkpointing, a directory or a file named *.safetensors for
/// safetensors, and a file for torch. A dcp destination keeps the source's chunks. A torch_checkpointing destination
/// has as many ranks as the source's tensors are sharded over. A tensor that is sharded in the source is sharded as by
/// `Shard(dim)` along the first dimension that is sharded there; every rank has the other tensors and all objects. Its
/// items are the keys at the root of the state, or one item `model` if a key cannot name an item. Throws `Error`:
/// invalid_argument if the destination exists, is the source or is inside it, and for a wrong `file_of_tensor`;
/// not_found if its parent directory or a config.json in `hf_config` does not exist; unsupported for a dtype that the
/// format does not have or a cast that is not available; corrupt; io; cancelled.
ConvertReport convert(const std::shared_ptr<const Checkpoint>& source, const std::filesystem::path& destination,
                      const ConvertOptions& options);

/// Converts `source` to safetensors, each file by one of the ranks, on storage that all of them have mounted:
/// consolidates what ranks saved. A collective of `link`; all ranks must pass the same checkpoint, destination and
/// options. Returns the same report on all ranks. If any rank fails, every rank throws, and the destination does not
/// exist. Throws as above, and `Error(unsupported)` for another format. PyTorch:
/// consolidate_safetensors_files_on_every_rank.
ConvertReport convert(const std::shared_ptr<const Checkpoint>& source, const std::filesystem::path& destination,
                      const ConvertOptions& options, RankLink& link);

struct ReshardOptions : ConvertOptions {
  std::int64_t ranks = 1;
  /// The dimension to shard, negative from the last. A tensor without it is sharded in its last one.
  std::int64_t dim = 0;
  std::shared_ptr<const Checkpoint> like;  ///< if not null, take ranks and boxes from this checkpoint instead
};

/// Writes `source` as a DCP checkpoint of `ranks` ranks. Each tensor is sharded as by `Shard(dim)` (PyTorch's chunking;
/// empty shards are not stored), or as in `like`. Rank 0 gets objects and scalars. Throws as `convert`.
ConvertReport reshard(const std::shared_ptr<const Checkpoint>& source, const std::filesystem::path& destination,
                      const ReshardOptions& options);

}  // namespace tessera::checkpoint
