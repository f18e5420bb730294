#pragma once
/// \file
/// Saves a state that ranks hold together as a checkpoint in PyTorch's distributed format, or as the safetensors shards
/// that its HuggingFace writer makes.
///
/// Law of the first: at every instant the place holds the checkpoint that was there before, whole, or the new one,
/// whole. Data goes to files that no committed checkpoint refers to, all ranks make theirs durable, and one rename of
/// `.metadata` commits. If anything fails before that, on any rank, all ranks throw and remove what they wrote. Data
/// files of the old checkpoint, and what earlier saves left that were killed, are removed after the commit.
///
/// Safetensors shards have no file that could commit them, since their readers take what the directory lists: they are
/// saved into a place where no checkpoint is. Files have temporary names until all are durable, then the sidecar names
/// them, then they are renamed one by one. A kill before that leaves nothing that looks like a checkpoint; one amid the
/// renaming leaves some shards, which we refuse to open, as the sidecar names more; PyTorch doesn't look at that.
///
/// PyTorch: torch/distributed/checkpoint/state_dict_saver.py, hf_storage.py. See docs/decisions for how a save is
/// committed.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/cancellation.h"
#include "tessera/base/progress.h"
#include "tessera/checkpoint/flat_state.h"
#include "tessera/checkpoint/rank_link.h"
#include "tessera/checkpoint/storage.h"
#include "tessera/format/dcp_dialect.h"

namespace tessera::checkpoint {

class SavePlanner;  // tessera/checkpoint/save_planner.h

/// What is remembered from one save to the next, by every rank: where the plans of all ranks are those of the last
/// save, a byte of each says so instead of all plans being gathered. For saves of one planner over one link, one at a
/// time.
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
  /// `shard-<rank + 1>-model-<n>-of-<m>.safetensors`, each with the offsets of its chunks. Chunks of one tensor on one
  /// rank go to different files, since a file has a name once. Objects are carried as lossless JSON, which PyTorch
  /// passes over; those that JSON can't say are `Error(unsupported)`. Dtypes that safetensors lacks are stored as
  /// others of their size. See docs/formats/safetensors.md.
  safetensors_shards,
};

struct WriteOptions {
  SaveFormat format = SaveFormat::dcp;
  SavePlanner* planner = nullptr;  ///< null: the default
  SavePlanCache* cache = nullptr;  ///< null: nothing is remembered
  std::size_t threads = 0;         ///< that read elements and write files; 0: as many as processors
  /// Into how many files this rank's data goes, about equal in bytes; 0: one for each item.
  std::size_t files_per_rank = 1;
  dcp::Dialect dialect = dcp::Dialect::torch_2;  ///< which PyTorchs can load it, of dcp
  ProgressSink* progress = nullptr;
  const Cancellation* cancellation = nullptr;
};

struct WriteReport {
  std::uint64_t written_bytes = 0;       ///< by this rank, into data files
  std::vector<std::string> files;        ///< of this rank
  std::uint64_t planned_bytes = 0;       ///< plans and answers that this rank sent
  bool plan_was_reused = false;          ///< the cache's
  std::vector<std::string> not_removed;  ///< on rank 0: files of the old checkpoint that could not be removed, and why
};

/// A collective of `link`. Throws on all ranks what went wrong on any: `Error(invalid_argument)` for states that don't
/// fit together (see make_global_plan), `Error(io)` naming rank and file, `Error(rank_failure)` for a rank that died,
/// `Error(cancelled)`. A rank that dies after the others reported success leaves open whether the save was committed;
/// the storage knows.
WriteReport write_state(const FlatState& state, const std::shared_ptr<Storage>& storage, RankLink& link = alone(),
                        const WriteOptions& options = {});

}  // namespace tessera::checkpoint
