#pragma once
// How a format keeps what ranks save: the files of a rank, and what makes the files of all ranks a checkpoint.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/convert/output_plan.h"
#include "tessera/checkpoint/flat_state.h"
#include "tessera/checkpoint/global_save_plan.h"
#include "tessera/checkpoint/save.h"
#include "tessera/checkpoint/save_planner.h"
#include "tessera/checkpoint/sidecar.h"
#include "tessera/checkpoint/storage.h"

namespace tessera::checkpoint {

// What a rank writes.
struct RankItems {
  const FlatState& state;
  const SavePlan& plan;
  SavePlanner& planner;
  std::span<const std::uint32_t> writes;  // items of the plan, ascending
};

// What a rank says when its files are durable.
struct RankReport {
  std::vector<std::uint64_t> object_bytes;  // of its objects' archives, in order, where the format has them
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

  // Bytes that a chunk takes in storage, whatever its elements are.
  virtual std::uint64_t chunk_bytes(DType dtype, std::span<const std::int64_t> sizes) = 0;
  // On rank 0, before any rank writes: the generation of the files to come. Throws if the place can't be saved to.
  virtual std::int64_t begin(Storage& storage) = 0;
  // The files of a rank, whose units are to be made one after the other while `items` live. Objects are resolved here.
  virtual std::vector<PlannedFile> rank_files(const RankItems& items, int rank, std::int64_t generation,
                                              RankReport& report) = 0;
  // On rank 0, when the files of all ranks are durable: makes them the checkpoint, or throws and leaves the place as it
  // was but for these files. `files_per_rank` is what each rank's options say. Returns what of the old checkpoint could
  // not be removed, with the reason.
  virtual std::vector<std::string> commit(Storage& storage, GlobalSavePlan& plan,
                                          const std::vector<RankReport>& reports,
                                          const std::vector<std::size_t>& files_per_rank, std::int64_t generation) = 0;
};

std::unique_ptr<FormatWriter> make_dcp_writer(const WriteOptions& options);
std::unique_ptr<FormatWriter> make_safetensors_writer(const WriteOptions& options);

// The elements of an item of a tensor.
Data item_data(const RankItems& items, std::uint32_t item);

}  // namespace tessera::checkpoint
