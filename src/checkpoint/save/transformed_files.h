#pragma once
// Writes the files of a rank whose items pass transforms, so that their sizes are known only when they are written.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/convert/output_plan.h"
#include "checkpoint/save/format.h"
#include "tessera/base/progress.h"

namespace tessera::checkpoint {

// Writes `files`, each on one thread and in order, and makes them durable. Records in `report` the sizes of the items,
// the transforms and the files, and adds the name of each file to `created` as soon as it exists. Returns the size of
// all files. Memory: a block of elements and one of the file for each thread, and what the transforms use.
std::uint64_t write_transformed(std::span<const PlannedFile> files, Storage& storage, const WriteOptions& options,
                                std::size_t threads, ProgressSink& progress, RankReport& report,
                                std::vector<std::string>& created);

}  // namespace tessera::checkpoint
