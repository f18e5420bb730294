#pragma once
// Commits a DCP checkpoint whose data files are durable.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/consult.h"
#include "tessera/base/bytes.h"
#include "tessera/checkpoint/sidecar.h"
#include "tessera/checkpoint/storage.h"

namespace tessera::checkpoint {

// The place of a save among those to one storage. Saves may overlap in time, also with one that is killed.
//
// Law: a save renames and removes no file of a save that began later or is of the same generation. Only one commit runs
// at a time: it has the sidecar under its temporary name. A commit throws if a save that began later was committed
// before, and that of safetensors shards if a later one has removed them.
struct SaveTurn {
  std::int64_t generation = 0;  // larger than that of any existing file
  // The temporary sidecar when the save began. If it is the same when the save commits, it was left by a killed save.
  std::optional<Bytes> left_sidecar = std::nullopt;
};
SaveTurn begin_save(const Storage& storage);

// Creates the temporary sidecar, after it completed or removed one that a killed save left. Throws
// Error(invalid_argument) if another save is being committed.
std::unique_ptr<OutputFile> begin_commit(Storage& storage, const SaveTurn& turn);

// Replaces `.metadata` and then the sidecar, each by renaming a durable file. Between the two renames, the sidecar that
// belongs to `.metadata` has its temporary name; read_sidecar() handles that. `sidecar` must not list `.metadata`. If
// anything fails, restores the old files and rethrows the exception. `write_metadata` passes the bytes of `.metadata`
// to a sink, in order and in any pieces.
//
// Law: after `.metadata` may have been renamed, nothing that either `.metadata` names may be removed until one of them
// is durable. If the old one cannot be restored and made durable, throws OutcomeUnknown: the storage holds one of the
// two checkpoints, and the caller must not remove files of either.
using WriteMetadata = std::function<void(const std::function<void(ByteView bytes)>& sink)>;
void commit(Storage& storage, const SaveTurn& turn, const WriteMetadata& write_metadata, Sidecar sidecar);

// Removes data files and uncommitted files of generations before `generation`, and metadata of single ranks, except
// those in `referenced`. Returns the files that could not be removed, with the reasons. Does not throw: it runs after
// the commit.
std::vector<std::string> remove_unreferenced(Storage& storage, const std::set<std::string>& referenced,
                                             std::int64_t generation);

}  // namespace tessera::checkpoint
