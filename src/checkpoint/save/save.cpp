#include "tessera/checkpoint/save.h"

#include <algorithm>
#include <utility>

#include "checkpoint/byte_cursor.h"
#include "checkpoint/consult.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/internal/save_steps.h"

namespace tessera::checkpoint {

// A rank's last plan, and on the coordinator the merged plan of all ranks.
struct SavePlanCache::State {
  Bytes entries, items;               // this rank's plan, encoded
  std::vector<std::uint32_t> writes;  // items of the plan that this rank writes, ascending
  std::size_t files_per_rank = 1;
  int coordinator = 0;
  MergedPlans merged;  // on the coordinator
};

SavePlanCache::SavePlanCache() = default;
SavePlanCache::~SavePlanCache() = default;

class Saver {
 public:
  Saver(const FlatState& state, const std::shared_ptr<Storage>& storage, RankLink& link, const WriteOptions& options)
      : storage_(*storage),
        link_(link),
        options_(options),
        remembered_(options.cache != nullptr ? options.cache->state_ : not_remembered_),
        steps_(state, storage, options) {}

  WriteReport run() {
    begin();
    if (!steps_.report().plan_was_reused) plan();
    finish();
    return std::move(steps_.report());
  }

 private:
  // Makes this rank's plan. Every rank learns whether all plans equal those of the last save, and the generation of the
  // new files.
  void begin() {
    const auto request = [&] {
      steps_.make_plan();
      const bool is_same =
          remembered_ != nullptr && remembered_->entries == steps_.entries() && remembered_->items == steps_.items() &&
          remembered_->files_per_rank == options_.files_per_rank && remembered_->coordinator == link_.coordinator();
      return Bytes{static_cast<std::uint8_t>(is_same ? 1 : 0)};
    };
    const auto answer = [&](const std::vector<Bytes>& same) {
      const bool all = std::all_of(same.begin(), same.end(), [](const Bytes& one) { return one.at(0) == 1; });
      Bytes out{static_cast<std::uint8_t>(all ? 1 : 0)};
      name_rank_of_error([&] { append_little_endian(out, static_cast<std::uint64_t>(steps_.begin_generation())); });
      return std::vector<Bytes>(same.size(), out);
    };
    const Bytes reply = consult(link_, "plan the save", request, answer);
    ByteCursor cursor(reply, "answer to a save plan");
    steps_.report().plan_was_reused = cursor.number<std::uint8_t>() == 1;
    generation_ = static_cast<std::int64_t>(cursor.number<std::uint64_t>());
    steps_.report().planned_bytes += 1;
  }

  void plan() {
    remembered_ = std::make_unique<SavePlanCache::State>();
    // Ranks with the same entries as the coordinator, as most have, do not send them.
    const Bytes entries_of_coordinator = link_.broadcast(steps_.entries());
    const auto request = [&] {
      Bytes message = steps_.plan_message(steps_.entries() == entries_of_coordinator && !link_.is_coordinator());
      steps_.report().planned_bytes += message.size();
      return message;
    };
    const auto answer = [&](std::vector<Bytes> messages) {
      return steps_.merge(std::move(messages), static_cast<std::size_t>(link_.coordinator()), remembered_->merged);
    };
    remembered_->writes = steps_.writes_of(consult(link_, "plan the save", request, answer));
    remembered_->files_per_rank = options_.files_per_rank;
    remembered_->coordinator = link_.coordinator();
    remembered_->entries = steps_.entries();
    remembered_->items = steps_.items();
  }

  void finish() {
    bool known_to_have_failed = false;
    Bytes answer;  // one byte: whether any rank has a hook to call after the commit
    const std::string step = fmt::format("save to {}", storage_.name());
    try {
      answer = consult(
          link_, step, [&] { return steps_.write(remembered_->writes, link_.rank(), generation_); },
          [&](const std::vector<Bytes>& reports) {
            bool has_hook = false;
            name_rank_of_error([&] { has_hook = steps_.commit(reports, remembered_->merged, generation_); });
            return std::vector<Bytes>(reports.size(), Bytes{static_cast<std::uint8_t>(has_hook ? 1 : 0)});
          },
          &known_to_have_failed);
    } catch (...) {
      if (known_to_have_failed) steps_.remove_created();
      if (options_.cache != nullptr) options_.cache->state_ = nullptr;
      throw;
    }
    if (options_.cache != nullptr) options_.cache->state_ = std::move(remembered_);
    if (answer.at(0) == 0) return;
    link_.agree_on(step + ": after the commit", [&] {
      if (options_.after_commit) options_.after_commit();
    });
  }

  // Runs `f` on the coordinator. Its errors reach all ranks, so they name it.
  template <typename F>
  void name_rank_of_error(const F& f) {
    const auto named = [&](const std::exception& error) {
      return link_.size() == 1 ? std::string(error.what())
                               : fmt::format("save to {}: rank {}: {}", storage_.name(), link_.rank(), error.what());
    };
    try {
      f();
    } catch (const OutcomeUnknown& error) {
      throw OutcomeUnknown(error.code(), named(error));
    } catch (const Error& error) {
      throw Error(error.code(), named(error));
    } catch (const std::exception& error) {  // of a program's own storage or planner
      throw Error(ErrorCode::internal, named(error));
    }
  }

  Storage& storage_;
  RankLink& link_;
  const WriteOptions& options_;
  std::unique_ptr<SavePlanCache::State> not_remembered_;
  std::unique_ptr<SavePlanCache::State>& remembered_;
  SaveSteps steps_;
  std::int64_t generation_ = 0;
};

WriteReport write_state(const FlatState& state, const std::shared_ptr<Storage>& storage, RankLink& link,
                        const WriteOptions& options) {
  return Saver(state, storage, link, options).run();
}

}  // namespace tessera::checkpoint
