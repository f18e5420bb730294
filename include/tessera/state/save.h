#pragma once
/// \file
/// Saves a state dict that ranks hold together, as a checkpoint that every PyTorch since 1.13 loads.
///
///     tessera::save({{"model", get_model_state_dict(*model)}, {"step", 100}}, "checkpoints/step-100", group);
///
/// Each rank saves what it has: its shards of sharded tensors and of Checkpointables; tensors and objects that all
/// ranks have are written once. Law: load(save(s)) == s, on any number of ranks and with any sharding.
/// PyTorch: torch/distributed/checkpoint/state_dict_saver.py.

#include <filesystem>
#include <memory>

#include "tessera/checkpoint/save.h"
#include "tessera/checkpoint/storage.h"
#include "tessera/comm/process_group.h"
#include "tessera/state/value.h"

namespace tessera {

/// What a save wrote.
using SaveReport = checkpoint::WriteReport;

struct SaveOptions : checkpoint::WriteOptions {
  /// Whether nested dicts and lists become names with dots. If not, the state dict's values are tensors and objects.
  bool flatten_state_dict = true;
  /// Whether nested sharded tensors are taken apart.
  bool flatten_sharded_tensors = true;
};

/// A collective of `group`, in which all ranks give the same place. The place then holds this checkpoint alone, or,
/// after an error or a kill at any instant, the one that it held before; see tessera/checkpoint/save.h. Elements on
/// other devices than the CPU are copied as they are written. Throws on all ranks what went wrong on any, naming it:
/// `Error(invalid_argument)` for names that stand twice and states that don't fit together, `Error(unsupported)` for
/// tensors that aren't strided, `Error(io)`, `Error(rank_failure)`.
SaveReport save(const StateDict& state, const std::filesystem::path& directory, const ProcessGroup& group = {},
                const SaveOptions& options = {});
SaveReport save(const StateDict& state, const std::shared_ptr<checkpoint::Storage>& storage,
                const ProcessGroup& group = {}, const SaveOptions& options = {});

}  // namespace tessera
