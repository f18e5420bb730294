#pragma once
/// \file
/// Functions to save a state that is distributed over ranks, as a checkpoint in PyTorch's distributed format (DCP) or
/// as the safetensors shards of PyTorch's HuggingFace writer.
///
/// Law for DCP: at every instant the storage holds either the complete old checkpoint or the complete new one. Ranks
/// write data to files that no committed checkpoint refers to and make them durable; then one rename of `.metadata`
/// commits. If any rank fails before the commit, every rank throws and removes the files it wrote. Data files of the
/// old checkpoint, and leftovers of saves that were killed, are removed after the commit.
///
/// Saves to one storage may overlap in time, although they should not. Each then commits its complete checkpoint or
/// throws `Error(invalid_argument)`: if another save is being committed at that moment, or one that began later was
/// committed already. If a commit takes as long as all of a later save, for example because its storage hangs, the
/// later save takes it for killed; the earlier save then throws and changes nothing of the later one. Of overlapping
/// saves of safetensors shards, all except the one that began last throw, unless they committed before it began.
///
/// Safetensors shards cannot be committed by one rename, because their readers take every file in the directory.
/// Therefore they can only be saved to a storage without a checkpoint. Files have temporary names until all are
/// durable; then the sidecar that lists them is written, and they are renamed one by one. If the save is killed before
/// the renames, nothing looks like a checkpoint. If it is killed between renames, some shards are visible:
/// `Checkpoint::open` refuses them because the sidecar lists more, but PyTorch does not check that.
///
/// PyTorch: torch/distributed/checkpoint/state_dict_saver.py, hf_storage.py. See docs/decisions for how a save is
/// committed.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/cancellation.h"
#include "tessera/base/progress.h"
#include "tessera/checkpoint/flat_state.h"
#include "tessera/checkpoint/rank_link.h"
#include "tessera/checkpoint/storage.h"
#include "tessera/checkpoint/transform.h"
#include "tessera/format/dcp_dialect.h"

namespace tessera::checkpoint {

class SavePlanner;  // tessera/checkpoint/global_save_plan.h

/// Each rank's memory of the last save. If the plans of all ranks equal those of the last save, each rank sends one
/// byte and the plans are not gathered again. Use one cache for saves with the same planner and the same link, one save
/// at a time.
class SavePlanCache {
 public:
  SavePlanCache();
  ~SavePlanCache();
  SavePlanCache(const SavePlanCache&) = delete;
  SavePlanCache& operator=(const SavePlanCache&) = delete;

 private:
  friend class Saver;
  struct State;
  std::unique_ptr<State> state_;
};

enum class SaveFormat : std::uint8_t {
  dcp,  ///< `.metadata` and `__<rank>_<n>.distcp`
  /// `shard-<rank + 1>-model-<n>-of-<m>.safetensors`, each with the offsets of its chunks. Several chunks of one tensor
  /// on one rank go to different files, since a name occurs only once per file. Objects are stored as lossless JSON,
  /// which PyTorch ignores; objects that JSON cannot represent throw `Error(unsupported)`. Dtypes that safetensors
  /// lacks are stored as other dtypes of equal size. See docs/formats/safetensors.md.
  safetensors_shards,
};

struct WriteOptions {
  SaveFormat format = SaveFormat::dcp;
  SavePlanner* planner = nullptr;  ///< null for the default
  SavePlanCache* cache = nullptr;  ///< null to gather the plans for every save
  std::size_t threads = 0;         ///< threads that read elements and write files; 0 for one per processor
  /// Number of files for this rank's data, about equal in bytes; 0 for one file per item.
  std::size_t files_per_rank = 1;
  dcp::Dialect dialect = dcp::Dialect::torch_2;  ///< for dcp: which PyTorch versions can load the checkpoint
  /// For dcp: whether a DCP checkpoint in the storage is replaced. If not, and there is one, every rank throws
  /// `Error(invalid_argument)` before any file is written, or at the commit if another save was committed meanwhile.
  /// PyTorch: `overwrite` of FileSystemWriter.
  bool overwrite = true;
  /// For dcp: a name of this save, which readers find in Metadata::storage_meta. That of the coordinator counts. Not
  /// stored by the dialects torch_1_13 and torch_2_0, which do not have it. PyTorch stores a random one.
  std::optional<std::string> save_id = std::nullopt;
  ProgressSink* progress = nullptr;
  const Cancellation* cancellation = nullptr;
  /// For dcp: transforms that each item passes in this order before it is stored, for PyTorch 2.7 and later; see
  /// transform.h. One thread transforms a file: use several files per rank to use several threads. Every rank throws
  /// `Error(invalid_argument)` for another format, or a dialect of earlier versions. PyTorch: `_extensions`.
  std::vector<TransformPtr> transforms = {};
  /// Called on each rank when its files are durable, before any rank can see the checkpoint. If it throws on any rank,
  /// the save fails on every rank and the storage is as it was. PyTorch: pre_commit of an experimental writer's hook.
  std::function<void()> before_commit = nullptr;
  /// Called on each rank after the commit. If it throws on any rank, every rank throws; the checkpoint stays. PyTorch:
  /// post_commit.
  std::function<void()> after_commit = nullptr;
};

struct WriteReport {
  std::uint64_t written_bytes = 0;  ///< written to data files by this rank
  std::vector<std::string> files;   ///< data files of this rank
  std::uint64_t planned_bytes = 0;  ///< sent by this rank for planning
  bool plan_was_reused = false;     ///< the plan came from the cache
  std::vector<std::string>
      not_removed;  ///< on the coordinator: files of the old checkpoint that could not be removed, and why
};

/// Saves `state` to `storage`. A collective of `link`; blocks until the checkpoint is committed. If any rank fails,
/// every rank throws: `Error(invalid_argument)` if the ranks' states do not fit together (see make_global_plan) or
/// the storage has a checkpoint that must not be replaced, `Error(io)` naming rank and file, `Error(rank_failure)` if a
/// rank died, `Error(cancelled)`. If a rank dies after the others reported success, they cannot tell whether the save
/// was committed; only the storage can.
WriteReport write_state(const FlatState& state, const std::shared_ptr<Storage>& storage, RankLink& link = alone(),
                        const WriteOptions& options = {});

}  // namespace tessera::checkpoint
