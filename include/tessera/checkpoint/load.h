#pragma once
/// \file
/// Loads what this rank wants of a checkpoint, whatever ranks and layout it was saved with, and nothing but the bytes
/// that takes.
///
/// PyTorch: torch/distributed/checkpoint/state_dict_loader.py.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/cancellation.h"
#include "tessera/base/progress.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/load_plan.h"
#include "tessera/checkpoint/rank_link.h"
#include "tessera/checkpoint/storage.h"

namespace tessera::checkpoint {

/// Decides what is read for what is wanted. Derive from it to load other names or other boxes.
class LoadPlanner {
 public:
  virtual ~LoadPlanner() = default;
  virtual LoadPlan create_local_plan(const Targets& targets, const Checkpoint& checkpoint, const LoadRules& rules) {
    return make_load_plan(targets, checkpoint, rules);
  }
};

struct ReadOptions {
  LoadRules rules;
  LoadPlanner* planner = nullptr;  ///< null: the default
  /// Compares what was read whole with its checksum. What was read in part has none.
  bool check_checksums = true;
  /// Ranks, mostly those of one node, which all load at once with each other here: stored elements that several of them
  /// want are read by one and sent to the others. Objects are read by each. Null: each rank reads what it wants.
  RankLink* share_reads_among = nullptr;
  std::size_t threads = 0;  ///< that read; 0: as many as processors, at least 4
  ProgressSink* progress = nullptr;
  const Cancellation* cancellation = nullptr;
};

struct ReadReport {
  std::uint64_t wanted_bytes = 0;  ///< of elements, as they are stored
  /// Of elements, from files, by this rank for itself and others: what lies between them and was read, too, included.
  std::uint64_t read_bytes = 0;
  std::vector<std::string> missing;
  std::map<std::string, ObjectValue> objects;  ///< by the target's name
};

/// The checkpoint that `storage` holds, the same on all ranks, though it may be saved over meanwhile: rank 0 reads what
/// describes it. A collective; what one rank can't open is an error on all.
std::shared_ptr<const Checkpoint> open_on_all_ranks(const std::shared_ptr<const Storage>& storage, RankLink& link);

/// A collective. Fills the memory of `targets`. Throws on all ranks what went wrong on any: as `make_load_plan`;
/// `Error(corrupt)` naming file, byte offset and tensor; `Error(io)`. Memory of targets may then be filled in part.
ReadReport read_state(const Targets& targets, const std::shared_ptr<const Checkpoint>& checkpoint,
                      RankLink& link = alone(), const ReadOptions& options = {});

}  // namespace tessera::checkpoint
