#pragma once
/// \file
/// Loads a checkpoint into a state dict, whatever ranks and sharding it was saved with.
///
///     StateDict state{{"model", get_model_state_dict(*model)}, {"step", 0}};
///     tessera::load(state, "checkpoints/step-100", group);
///     std::int64_t step = state.at("step").get<std::int64_t>();
///
/// The state dict says what is wanted: tensors of any kind are filled where they are, each rank's part on that rank;
/// anything else is replaced by what was saved. Nothing but the bytes wanted is read.
/// PyTorch: torch/distributed/checkpoint/state_dict_loader.py.

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/storage.h"
#include "tessera/comm/process_group.h"
#include "tessera/state/value.h"

namespace tessera {

struct LoadOptions : checkpoint::ReadOptions {
  /// As of SaveOptions: what the checkpoint was saved with.
  bool flatten_state_dict = true;
  bool flatten_sharded_tensors = true;
  /// Ranks that all load together, mostly those of one node (see ProcessGroup::subgroup), among which what several want
  /// is read by one and sent to the others: for storage that is slower than the group. By default each rank reads.
  ProcessGroup node_group = {};
};

struct LoadReport {
  std::uint64_t wanted_bytes = 0, read_bytes = 0;  ///< see checkpoint::ReadReport
  std::vector<std::string> missing;                ///< flat names that were left as they are, where that is allowed
};

/// A collective of `group`, in which all ranks give the same place. Checkpoints of before PyTorch 2.4 have other names
/// for what holds no tensors: they are recognised by them. Throws on all ranks what went wrong on any, and then objects
/// in `state` are as they were, while tensors may be filled in part: `Error(not_found)` for names that the checkpoint
/// hasn't (unless `rules.allow_partial`), `Error(invalid_argument)` for tensors of another shape or dtype (unless
/// `rules.allow_cast`) and for tensors that overlap themselves, `Error(corrupt)` naming file, byte and tensor,
/// `Error(io)`, `Error(rank_failure)`.
LoadReport load(StateDict& state, const std::filesystem::path& directory, const ProcessGroup& group = {},
                const LoadOptions& options = {});
LoadReport load(StateDict& state, const std::shared_ptr<checkpoint::Storage>& storage, const ProcessGroup& group = {},
                const LoadOptions& options = {});

/// The whole state of a checkpoint, nested as it was saved, its tensors on the CPU. Not a collective: for a process
/// that wants all of it. Throws as `load`, and `Error(unsupported)` for a dtype that the LibTorch here hasn't.
StateDict load_full(const std::filesystem::path& path);

}  // namespace tessera
