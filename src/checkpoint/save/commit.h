#pragma once
// Commits a DCP checkpoint whose data files are durable.

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/consult.h"
#include "tessera/base/bytes.h"
#include "tessera/checkpoint/sidecar.h"
#include "tessera/checkpoint/storage.h"

namespace tessera::checkpoint {

// Returns one more than the largest generation of the existing data files, or 0 if there are none.
std::int64_t next_generation(const Storage& storage);

// Replaces `.metadata` and then the sidecar, each by renaming a durable file. Between the two renames, the sidecar that
// belongs to `.metadata` has its temporary name; read_sidecar() handles that. `sidecar` must not list `.metadata`. If
// anything fails, restores the old files and rethrows the error. `write_metadata` passes the bytes of `.metadata` to a
// sink, in order and in any pieces.
//
// Law: after `.metadata` may have been renamed, nothing that either `.metadata` names may be removed until one of them
// is durable. If the old one cannot be restored and made durable, throws OutcomeUnknown: the storage holds one of the
// two checkpoints, and the caller must not remove files of either.
using WriteMetadata = std::function<void(const std::function<void(ByteView bytes)>& sink)>;
void commit(Storage& storage, const WriteMetadata& write_metadata, Sidecar sidecar);

// Removes data files, metadata of single ranks, and files of interrupted saves, except those in `referenced`. Returns
// the files that could not be removed, with the reasons.
std::vector<std::string> remove_unreferenced(Storage& storage, const std::set<std::string>& referenced);

}  // namespace tessera::checkpoint
