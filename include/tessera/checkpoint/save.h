#pragma once
/// \file
/// Saves a state that ranks hold together as a checkpoint in PyTorch's distributed format.
///
/// Law: at every instant the place holds the checkpoint that was there before, whole, or the new one, whole. Data goes
/// to files that no committed checkpoint refers to, all ranks make theirs durable, and one rename of `.metadata`
/// commits. If anything fails before that, on any rank, all ranks throw and remove what they wrote. Data files of the
/// old checkpoint, and what earlier saves left that were killed, are removed after the commit.
///
/// PyTorch: torch/distributed/checkpoint/state_dict_saver.py. See docs/decisions for how a save is committed.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/cancellation.h"
#include "tessera/base/progress.h"
#include "tessera/checkpoint/flat_state.h"
#include "tessera/checkpoint/rank_link.h"
#include "tessera/checkpoint/save_planner.h"
#include "tessera/checkpoint/storage.h"

namespace tessera::checkpoint {

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

struct SaveOptions {
  SavePlanner* planner = nullptr;  ///< null: the default
  SavePlanCache* cache = nullptr;  ///< null: nothing is remembered
  std::size_t threads = 0;         ///< that read elements and write files; 0: as many as processors
  /// Into how many files this rank's data goes, about equal in bytes; 0: one for each item.
  std::size_t files_per_rank = 1;
  dcp::Dialect dialect = dcp::Dialect::torch_2;  ///< which PyTorchs can load it
  ProgressSink* progress = nullptr;
  const Cancellation* cancellation = nullptr;
};

struct SaveReport {
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
SaveReport save(const FlatState& state, const std::shared_ptr<Storage>& storage, RankLink& link = alone(),
                const SaveOptions& options = {});

}  // namespace tessera::checkpoint
