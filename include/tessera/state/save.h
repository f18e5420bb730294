#pragma once
/// \file
/// Saves a sharded state dict as a checkpoint that PyTorch loads; `WriteOptions::dialect` selects the versions.
///
///     tessera::save({{"model", get_model_state_dict(*model)}, {"step", 100}}, "checkpoints/step-100", group);
///
/// Each rank writes its shards of sharded tensors and Checkpointables. Tensors and objects that all ranks have are
/// written once. A Stateful (stateful.h) is saved as its state. Law: load(save(s)) == s, on any number of ranks and
/// with any sharding. PyTorch: torch/distributed/checkpoint/state_dict_saver.py.

#include <cstdint>
#include <filesystem>
#include <memory>

#include "tessera/checkpoint/save.h"
#include "tessera/checkpoint/storage.h"
#include "tessera/comm/process_group.h"
#include "tessera/state/value.h"

namespace tessera {

/// The report of a save: what this rank wrote.
using SaveReport = checkpoint::WriteReport;

struct SaveOptions : checkpoint::WriteOptions {
  /// Whether nested dicts and lists are flattened to names with dots. If not, each value of the state dict is saved as
  /// one tensor or one object.
  bool flatten_state_dict = true;
  /// Whether nested sharded tensors are converted to plain ones; see flatten_sharded_tensors.h.
  bool flatten_sharded_tensors = true;
  /// The rank of the group that makes the global plan and writes `.metadata`.
  int coordinator_rank = 0;
  /// The most pinned memory through which elements of a device are copied while files are written, in bytes for each
  /// device of this rank; one block of 4 MiB if less. AsyncSaver copies all of the state instead.
  std::uint64_t staging_bytes = std::uint64_t{256} << 20;
};

/// Saves `state` to `directory`. A collective of `group`; all ranks must pass the same directory. Afterwards the
/// directory holds only this checkpoint. After an error, or if the job is killed at any instant, it holds the previous
/// checkpoint; see tessera/checkpoint/save.h. Without a group, this process saves alone and does not communicate, even
/// if it belongs to groups; `state` must then have all shards of its tensors. PyTorch: `no_dist`. Of tensors on a
/// device, saves the elements that the work enqueued on its current stream computes, and copies them while files are
/// written.
///
/// If any rank fails, every rank throws an error naming it: `Error(invalid_argument)` for duplicate names, for a
/// coordinator that is not in the group, for states that do not match between ranks and for a checkpoint that
/// `overwrite` protects, `Error(unsupported)` for tensors that are not strided or have elements and are on meta,
/// `Error(io)`, or `Error(rank_failure)`.
SaveReport save(const StateDict& state, const std::filesystem::path& directory, const ProcessGroup& group = {},
                const SaveOptions& options = {});
SaveReport save(const StateDict& state, const std::shared_ptr<checkpoint::Storage>& storage,
                const ProcessGroup& group = {}, const SaveOptions& options = {});

}  // namespace tessera
