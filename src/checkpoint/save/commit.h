#pragma once
// Makes a checkpoint whose data files are durable the one that the place holds.

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/checkpoint/sidecar.h"
#include "tessera/checkpoint/storage.h"

namespace tessera::checkpoint {

// One more than that of any data file that is there; 0 where there is none.
std::int64_t next_generation(const Storage& storage);

// Replaces `.metadata` and then the sidecar, each by a rename of a file that is durable. Between the two renames the
// sidecar that belongs to `.metadata` is the one with the temporary name: read_sidecar() knows that. `sidecar` lacks
// `.metadata` itself. If anything fails, what was there before is put back and the error thrown.
void commit(Storage& storage, const Bytes& metadata, Sidecar sidecar);

// Removes data files, metadata of single ranks, and files of interrupted saves, but those in `referenced`. Returns what
// could not be removed, with the reason.
std::vector<std::string> remove_unreferenced(Storage& storage, const std::set<std::string>& referenced);

}  // namespace tessera::checkpoint
