#pragma once
/// \file
/// Loads a checkpoint into a state dict, on any number of ranks and with any sharding.
///
///     StateDict state{{"model", get_model_state_dict(*model)}, {"step", 0}};
///     tessera::load(state, "checkpoints/step-100", group);
///     std::int64_t step = state.at("step").get<std::int64_t>();
///
/// The state dict specifies what to load. Tensors of any kind are filled in place, each rank's part on that rank; all
/// other values are replaced by the saved ones. A dict keeps its keys: the int 7 finds what is saved under "7". A
/// tensor or DTensor on meta is replaced by one with memory, on the CPU or the device of its mesh. A Stateful
/// (stateful.h) stays, and its state is set. Reads only the bytes that it needs. PyTorch:
/// torch/distributed/checkpoint/state_dict_loader.py.

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/storage.h"
#include "tessera/checkpoint/tensor_map.h"
#include "tessera/comm/process_group.h"
#include "tessera/state/value.h"

namespace tessera {

struct LoadOptions : checkpoint::ReadOptions {
  /// As in SaveOptions; must equal the options of the save.
  bool flatten_state_dict = true;
  bool flatten_sharded_tensors = true;
  /// A subgroup, usually the ranks of one host (see ProcessGroup::subgroup), in which one rank reads what several ranks
  /// need and sends it to the others. Useful if storage is slower than the group. All ranks of the subgroup must load
  /// together. By default each rank reads for itself.
  ProcessGroup node_group = {};
  /// The rank of the group that reads `.metadata` for all ranks.
  int coordinator_rank = 0;
  /// A map from the names and shapes of the checkpoint to those of the state, if they differ; the same on all ranks.
  std::optional<checkpoint::TensorMap> map = std::nullopt;
  /// The transforms of stored items that can be undone; null for those that tessera has. PyTorch: _extension_registry.
  std::shared_ptr<const checkpoint::TransformRegistry> transforms = nullptr;
  /// The most pinned memory through which elements are copied to a device while files are read, in bytes for each
  /// device of this rank; one block of 4 MiB if less.
  std::uint64_t staging_bytes = std::uint64_t{256} << 20;
};

struct LoadReport {
  std::uint64_t wanted_bytes = 0, read_bytes = 0, bytes_not_compared = 0;  ///< see checkpoint::ReadReport
  std::vector<std::string> missing;  ///< flat names not in the checkpoint, left unchanged (also on meta)
};

/// Loads `path` into `state`: the directory of a checkpoint, or one torch.save or safetensors file, of which each rank
/// reads its part. A collective of `group`; all ranks must pass the same path. Checkpoints written before PyTorch 2.4
/// name values without tensors differently; they are detected by these names. Without a group, this process loads alone
/// and does not communicate, even if it belongs to groups. PyTorch: `no_dist`.
///
/// If any rank fails, every rank throws; objects in `state` are then unchanged, but tensors may be partly filled. If a
/// Stateful throws when its state is set, those before it are set already.
/// Throws `Error(not_found)` for names that are not in the checkpoint (unless `rules.allow_partial`),
/// `Error(invalid_argument)` for tensors of another shape or dtype (unless `rules.allow_cast`) and for tensors whose
/// elements overlap in memory, `Error(unsupported)` for sharded tensors on meta, `Error(corrupt)` naming file, byte and
/// tensor, `Error(io)`, and `Error(rank_failure)`.
LoadReport load(StateDict& state, const std::filesystem::path& path, const ProcessGroup& group = {},
                const LoadOptions& options = {});
LoadReport load(StateDict& state, const std::shared_ptr<checkpoint::Storage>& storage, const ProcessGroup& group = {},
                const LoadOptions& options = {});

/// Returns the full state of a checkpoint, nested as it was saved, with full tensors on the CPU. Int keys of dicts that
/// were flattened are strings, since a checkpoint has only their text. Not a collective.
/// Throws as `load`, and `Error(unsupported)` for a dtype that this LibTorch does not have.
StateDict load_full(const std::filesystem::path& path);
/// Returns the part of that state that `names` selects: what has one of these flat names, or a flat name that begins
/// with one of them and a dot. The checkpoint alone states shapes and dtypes. Also throws `Error(not_found)` for a name
/// that selects nothing. PyTorch: `_load_state_dict_from_keys`.
///
///     const StateDict head = load_full("checkpoints/step-100", {"model.head", "step"});
StateDict load_full(const std::filesystem::path& path, const std::vector<std::string>& names);

}  // namespace tessera
