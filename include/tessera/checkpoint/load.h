#pragma once
/// \file
/// Functions to load the tensors and objects that each rank requests, from a checkpoint saved by any number of ranks in
/// any layout. Each rank reads only the bytes that it needs.
///
/// PyTorch: torch/distributed/checkpoint/state_dict_loader.py.

#include <cstdint>
#include <functional>
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

/// A planner that decides which stored pieces fill the targets. Derive from it to load under other names or other
/// boxes.
class LoadPlanner {
 public:
  virtual ~LoadPlanner() = default;
  virtual LoadPlan create_local_plan(const Targets& targets, const Checkpoint& checkpoint, const LoadRules& rules) {
    return make_load_plan(targets, checkpoint, rules);
  }
};

struct ReadOptions {
  LoadRules rules;
  LoadPlanner* planner = nullptr;  ///< null for the default
  /// Whether to verify the format's own checksum of each stored chunk that is read completely. Parts of chunks cannot
  /// be verified so. `OpenOptions::check_checksums` is for the sidecar, which also covers parts.
  bool check_checksums = true;
  /// Whether to compare blocks of the sidecar of which only scattered parts are read, too, by reading them completely.
  /// Then every byte that was read from the checkpoint, also by earlier reads, has been compared.
  bool compare_rest = false;
  /// A group of ranks, typically those of one node, that load together. Stored elements that several of them need are
  /// read by one and sent to the others. Each rank reads its objects itself. Null: each rank reads all it needs.
  RankLink* share_reads_among = nullptr;
  std::size_t threads = 0;  ///< reader threads; 0 for one per processor, at least 4
  ProgressSink* progress = nullptr;
  const Cancellation* cancellation = nullptr;
};

struct ReadReport {
  std::uint64_t wanted_bytes = 0;  ///< size of the requested elements, in the stored dtype
  /// Bytes that this rank read from files for tensors, its own and those of ranks it shares reads with, including gaps
  /// between requested elements.
  std::uint64_t read_bytes = 0;
  /// Size of the blocks of the sidecar of which only scattered parts were read from the checkpoint, in all reads so
  /// far, so that they were not compared.
  std::uint64_t bytes_not_compared = 0;
  std::vector<std::string> missing;            ///< target names that the checkpoint does not have
  std::map<std::string, ObjectValue> objects;  ///< by the target's name
};

/// Opens the checkpoint in `storage`. The coordinator reads `.metadata` and the sidecar for all ranks, so that every
/// rank gets the same checkpoint even if another save replaces it meanwhile. A collective. If one rank cannot open the
/// checkpoint, every rank throws.
std::shared_ptr<const Checkpoint> open_on_all_ranks(const std::shared_ptr<const Storage>& storage, RankLink& link,
                                                    const OpenOptions& options = {});

/// Does the part of `open_on_all_ranks` that communicates: a collective that throws on every rank if the coordinator
/// cannot read the metadata. Returns a function that does the rest on this rank alone, on any thread, and keeps the
/// metadata in memory.
std::function<std::shared_ptr<const Checkpoint>()> prepare_to_open(const std::shared_ptr<const Storage>& storage,
                                                                   RankLink& link, const OpenOptions& options = {});

/// Fills the memory of `targets` from `checkpoint`. A collective. If any rank fails, every rank throws the error: those
/// of `make_load_plan`; `Error(corrupt)` naming file, byte offset and tensor; `Error(io)`. Targets may then be partly
/// filled.
ReadReport read_state(const Targets& targets, const std::shared_ptr<const Checkpoint>& checkpoint,
                      RankLink& link = alone(), const ReadOptions& options = {});

}  // namespace tessera::checkpoint
