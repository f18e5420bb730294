#pragma once
// The interface of a format that ranks save in: the files of a rank, and the commit of all ranks' files.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/consult.h"
#include "checkpoint/convert/output_plan.h"
#include "tessera/checkpoint/flat_state.h"
#include "tessera/checkpoint/global_save_plan.h"
#include "tessera/checkpoint/save.h"
#include "tessera/checkpoint/sidecar.h"
#include "tessera/checkpoint/storage.h"

namespace tessera::checkpoint {

// The items that a rank writes.
struct RankItems {
  const FlatState& state;
  const SavePlan& plan;
  SavePlanner& planner;
  std::span<const std::uint32_t> writes;  // items of the plan, ascending
};

// The report of a rank to the coordinator after its files are durable.
struct RankReport {
  std::vector<std::uint64_t> object_bytes;  // of its objects' archives, in order, if the format stores archives
  // Of each item with its transforms, in the order in which the files store them; empty if there are no transforms.
  std::vector<std::uint64_t> transformed_bytes;
  std::vector<std::string> descriptors;  // of the transforms, as the metadata lists them
  bool has_after_commit = false;
  Sidecar files;

  Bytes encode() const;
  static RankReport decode(ByteView bytes);
};

class FormatWriter {
 public:
  FormatWriter() = default;
  FormatWriter(const FormatWriter&) = delete;
  FormatWriter& operator=(const FormatWriter&) = delete;
  virtual ~FormatWriter() = default;

  // Returns the size of a chunk in storage, which does not depend on its elements.
  virtual std::uint64_t chunk_bytes(DType dtype, std::span<const std::int64_t> sizes) = 0;
  // Called on the coordinator before any rank writes. Returns the generation of the new files. Throws if the format
  // cannot be saved to this storage.
  virtual std::int64_t begin(Storage& storage) = 0;
  // Plans the files of a rank and resolves its objects. The units must be made one at a time, while `items` are alive.
  virtual std::vector<PlannedFile> rank_files(const RankItems& items, int rank, std::int64_t generation,
                                              RankReport& report) = 0;
  // Called on the coordinator after the files of all ranks are durable. Commits them, or throws and leaves everything
  // but these files as it was. Throws OutcomeUnknown if that fails: then no file may be removed. `files_per_rank` has
  // each rank's option. Returns the files of the old checkpoint that could not be removed, with the reasons.
  virtual std::vector<std::string> commit(Storage& storage, GlobalSavePlan& plan,
                                          const std::vector<RankReport>& reports,
                                          const std::vector<std::size_t>& files_per_rank, std::int64_t generation) = 0;
};

std::unique_ptr<FormatWriter> make_dcp_writer(const WriteOptions& options);
std::unique_ptr<FormatWriter> make_safetensors_writer(const WriteOptions& options);

// Returns the elements of an item of a tensor.
Data item_data(const RankItems& items, std::uint32_t item);

}  // namespace tessera::checkpoint
