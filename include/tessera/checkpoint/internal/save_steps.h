#pragma once
// The steps of a save, without the communication between ranks. write_state runs them over a RankLink. A caller with
// its own communication, such as the C interface, sends `plan_message` of every rank to the coordinator, passes them to
// `answer_plans` there, sends each rank its answer for `write`, gathers what that returns, and calls `commit` on the
// coordinator.
//
// If a step before the commit throws on any rank, or `commit` throws anything but OutcomeUnknown, every rank calls
// `remove_created`. A rank that does not know must not. One object for each rank and save.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/flat_state.h"
#include "tessera/checkpoint/global_save_plan.h"
#include "tessera/checkpoint/save.h"

namespace tessera::checkpoint {

class FormatWriter;

// A failure of a commit whose effects could not be undone.
class OutcomeUnknown : public Error {
 public:
  using Error::Error;
};

// The merged plan of all ranks, on the coordinator.
struct MergedPlans {
  GlobalSavePlan global;
  std::vector<std::size_t> files_of_rank;  // WriteOptions::files_per_rank of each rank
};

class SaveSteps {
 public:
  // `state` and `options` must outlive this object.
  SaveSteps(const FlatState& state, std::shared_ptr<Storage> storage, const WriteOptions& options);
  ~SaveSteps();
  SaveSteps(const SaveSteps&) = delete;
  SaveSteps& operator=(const SaveSteps&) = delete;

  // --- each rank: its plan. Prepares the storage.
  void make_plan();
  const SavePlan& plan() const { return plan_; }
  const Bytes& entries() const { return entries_; }  // of the plan, encoded
  const Bytes& items() const { return items_; }
  // Returns the plan for the coordinator. `omits_entries` where they are those of the coordinator.
  Bytes plan_message(bool omits_entries = false) const;

  // --- coordinator: the answers to the messages of all ranks, in the order of ranks
  // Returns the generation of the new files. Throws if the storage cannot be saved to.
  std::int64_t begin_generation();
  // Merges the plans. `reference` is the rank whose entries others omit. Returns what each rank writes.
  std::vector<Bytes> merge(std::vector<Bytes> messages, std::size_t reference, MergedPlans& merged);
  // Both in one. Sets the generation. Each answer has the generation and the rank, too.
  std::vector<Bytes> answer_plans(std::vector<Bytes> messages, MergedPlans& merged, std::int64_t& generation);

  // --- each rank: its files, made durable
  // Returns the items that `merge` answered.
  std::vector<std::uint32_t> writes_of(ByteView answer) const;
  // Writes the files of rank `rank` and returns the report for the coordinator.
  Bytes write(std::span<const std::uint32_t> writes, int rank, std::int64_t generation);
  // What an answer of answer_plans has.
  struct Answer {
    std::int64_t generation;
    int rank;
    std::vector<std::uint32_t> writes;
  };
  Answer read_answer(ByteView answer) const;
  // Removes the files that this rank wrote. Those that cannot be removed, the next save removes.
  void remove_created() noexcept;

  // --- coordinator: the commit, after which remove_created has no effect. Returns whether any rank has a hook to call
  // after it.
  bool commit(const std::vector<Bytes>& reports, MergedPlans& merged, std::int64_t generation);

  WriteReport& report() { return report_; }
  const WriteReport& report() const { return report_; }

 private:
  const FlatState& state_;
  const std::shared_ptr<Storage> shared_storage_;
  Storage& storage_;
  const WriteOptions& options_;
  SavePlanner default_planner_;
  SavePlanner& planner_;
  const std::unique_ptr<FormatWriter> format_;
  SavePlan plan_;
  Bytes entries_, items_;
  std::vector<std::string> created_;
  WriteReport report_;
};

}  // namespace tessera::checkpoint
