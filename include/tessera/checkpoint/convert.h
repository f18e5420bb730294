#pragma once
/// \file
/// Writes a checkpoint in another format or another layout: streaming, in memory that doesn't grow with the state.
///
/// Law: nothing appears at the destination but a whole, synced checkpoint. Everything is written under a temporary name
/// beside it
/// (`.<name>.tessera-....partial`), synced, and renamed. If anything throws, the temporary is removed; what a killed
/// process left is removed by the next conversion to the same destination.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/cancellation.h"
#include "tessera/base/progress.h"
#include "tessera/checkpoint/checkpoint.h"

namespace tessera::checkpoint {

/// Which names take part. A name is taken if it matches one of `select` (or `select` is empty) and none of `exclude`.
/// Globs: `*` any characters, `?` one, `[a-z]` and `[!a-z]` one of a set.
struct Selection {
  std::vector<std::string> select, exclude;
  bool takes(std::string_view name) const;
};
bool glob_matches(std::string_view glob, std::string_view text);

struct ConvertOptions {
  SourceKind to = SourceKind::dcp;
  Selection selection;
  std::optional<DType> dtype;  ///< floating-point tensors become this
  std::uint64_t max_shard_bytes =
      0;                 ///< largest file, headers aside; 0 for the format's default. A tensor is never cut.
  std::size_t jobs = 0;  ///< threads that read and write; 0 for as many as there are processors
  bool dry_run = false;  ///< plan and report, write nothing
  ProgressSink* progress = nullptr;
  const Cancellation* cancellation = nullptr;
  std::function<void(const std::string&)> warn;  ///< what could not be carried, by name
};

struct ConvertReport {
  struct OutputFile {
    std::string name;
    std::uint64_t size_bytes = 0;
    std::uint64_t tensors = 0;  ///< pieces of tensors in it
  };
  std::uint64_t tensors = 0, objects = 0;
  std::uint64_t tensor_bytes = 0;  ///< elements written
  std::vector<OutputFile> files;
};

/// Converts `source` to `options.to` at `destination`, which must not exist: a directory for dcp, a directory or a file
/// named *.safetensors for safetensors, a file for torch. Into dcp, the chunks stay as they are in the source. Throws
/// `Error`: invalid_argument (destination exists, is the source, lies within it), unsupported (a dtype that the format
/// hasn't), corrupt, io, cancelled.
ConvertReport convert(const std::shared_ptr<const Checkpoint>& source, const std::filesystem::path& destination,
                      const ConvertOptions& options);

struct ReshardOptions : ConvertOptions {
  std::int64_t ranks = 1;
  std::int64_t dim = 0;                    ///< dimension to cut; tensors that haven't it are cut in their last one
  std::shared_ptr<const Checkpoint> like;  ///< take ranks and boxes from this one instead
};

/// Writes `source` as a DCP checkpoint of `ranks` ranks, each tensor cut as `Shard(dim)` cuts it (PyTorch's chunking;
/// empty shards are not stored), or laid out as `like` has it. Objects and scalars are rank 0's.
ConvertReport reshard(const std::shared_ptr<const Checkpoint>& source, const std::filesystem::path& destination,
                      const ReshardOptions& options);

}  // namespace tessera::checkpoint
