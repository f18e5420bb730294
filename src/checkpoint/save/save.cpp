#include "tessera/checkpoint/save.h"

#include <algorithm>
#include <utility>

#include "checkpoint/byte_cursor.h"
#include "checkpoint/consult.h"
#include "checkpoint/save/format.h"
#include "checkpoint/save/transformed_files.h"
#include "tessera/base/error.h"
#include "tessera/base/thread_pool.h"

namespace tessera::checkpoint {

// A rank's last plan, and on the coordinator the merged plan of all ranks.
struct SavePlanCache::State {
  Bytes entries, items;               // this rank's plan, encoded
  std::vector<std::uint32_t> writes;  // items of the plan that this rank writes, ascending
  std::size_t files_per_rank = 1;
  int coordinator = 0;
  // On the coordinator:
  GlobalSavePlan global;
  std::vector<std::size_t> files_of_rank;  // files_per_rank of each rank
};

SavePlanCache::SavePlanCache() = default;
SavePlanCache::~SavePlanCache() = default;

namespace {

// Returns a bit for each item of a rank: whether the rank writes it.
Bytes bits_of(const std::vector<GlobalSavePlan::Written>& written, std::size_t items) {
  Bytes bits((items + 7) / 8, 0);
  for (const GlobalSavePlan::Written& one : written)
    bits[one.item / 8] |= static_cast<std::uint8_t>(1u << (one.item % 8));
  return bits;
}

std::vector<std::uint32_t> from_bits(ByteView bits, std::size_t items) {
  if (bits.size() != (items + 7) / 8)
    fail(ErrorCode::corrupt, "save plan: an answer of {} bytes, expected {} for {} items", bits.size(), (items + 7) / 8,
         items);
  std::vector<std::uint32_t> numbers;
  for (std::uint32_t i = 0; i < items; ++i) {
    if ((bits[i / 8] >> (i % 8) & 1) != 0) numbers.push_back(i);
  }
  return numbers;
}

std::unique_ptr<FormatWriter> make_writer(const WriteOptions& options) {
  return options.format == SaveFormat::dcp ? make_dcp_writer(options) : make_safetensors_writer(options);
}

// Throws Error(invalid_argument) for transforms that no reader would undo.
void check_transforms(const WriteOptions& options) {
  if (options.transforms.empty()) return;
  if (options.format != SaveFormat::dcp) {
    fail(ErrorCode::invalid_argument, "save: transforms of safetensors shards, expected none: only DCP stores them");
  }
  if (options.dialect == dcp::Dialect::torch_1_13 || options.dialect == dcp::Dialect::torch_2_0) {
    fail(ErrorCode::invalid_argument,
         "save: transforms in the dialect of an early PyTorch, expected none: it would not undo them");
  }
  for (const TransformPtr& transform : options.transforms) {
    if (transform == nullptr) fail(ErrorCode::invalid_argument, "save: a transform is null, expected a transform");
  }
}

}  // namespace

class Saver {
 public:
  Saver(const FlatState& state, const std::shared_ptr<Storage>& storage, RankLink& link, const WriteOptions& options)
      : state_(state),
        shared_storage_(storage),
        storage_(*storage),
        link_(link),
        options_(options),
        planner_(options.planner != nullptr ? *options.planner : default_planner_),
        remembered_(options.cache != nullptr ? options.cache->state_ : not_remembered_),
        format_(make_writer(options)) {}

  WriteReport run() {
    begin();
    if (!report_.plan_was_reused) plan();
    finish();
    return std::move(report_);
  }

 private:
  // Makes this rank's plan. Every rank learns whether all plans equal those of the last save, and the generation of the
  // new files.
  void begin() {
    const auto request = [&] {
      check_transforms(options_);
      storage_.prepare();
      plan_ = planner_.create_local_plan(state_);
      for (std::size_t i = 0; i < plan_.size(); ++i) {
        const SavePlan::WriteItem item = plan_[i];
        const SavePlan::Entry& entry = plan_.entries()[item.entry];
        if (!entry.is_tensor) continue;
        plan_.set_stored_bytes(i, format_->chunk_bytes(entry.properties->dtype, item.box.sizes));
      }
      entries_ = plan_.encode_entries();
      items_ = plan_.encode_items();
      const bool is_same = remembered_ != nullptr && remembered_->entries == entries_ && remembered_->items == items_ &&
                           remembered_->files_per_rank == options_.files_per_rank &&
                           remembered_->coordinator == link_.coordinator();
      return Bytes{static_cast<std::uint8_t>(is_same ? 1 : 0)};
    };
    const auto answer = [&](const std::vector<Bytes>& same) {
      const bool all = std::all_of(same.begin(), same.end(), [](const Bytes& one) { return one.at(0) == 1; });
      Bytes out{static_cast<std::uint8_t>(all ? 1 : 0)};
      name_rank_of_error([&] { append_little_endian(out, static_cast<std::uint64_t>(format_->begin(storage_))); });
      return std::vector<Bytes>(same.size(), out);
    };
    const Bytes reply = consult(link_, "plan the save", request, answer);
    ByteCursor cursor(reply, "answer to a save plan");
    report_.plan_was_reused = cursor.number<std::uint8_t>() == 1;
    generation_ = static_cast<std::int64_t>(cursor.number<std::uint64_t>());
    report_.planned_bytes += 1;
  }

  void plan() {
    remembered_ = std::make_unique<SavePlanCache::State>();
    // Ranks with the same entries as the coordinator, as most have, do not send them.
    const Bytes entries_of_coordinator = link_.broadcast(entries_);
    const auto request = [&] {
      const bool is_same = entries_ == entries_of_coordinator;
      Bytes out;
      append_little_endian<std::uint64_t>(out, options_.files_per_rank);
      append_text(out, is_same && !link_.is_coordinator() ? std::string_view() : as_text(entries_));
      append(out, items_);
      report_.planned_bytes += out.size();
      return out;
    };
    const auto answer = [&](std::vector<Bytes> all) {
      std::vector<GatheredPlans::Encoded> encoded;
      for (Bytes& one : all) {
        ByteCursor cursor(one, "save plan");
        remembered_->files_of_rank.push_back(cursor.number<std::uint64_t>());
        const ByteView view = as_bytes(cursor.text());
        Bytes entries(view.begin(), view.end());
        one.erase(one.begin(), one.end() - static_cast<std::ptrdiff_t>(cursor.rest().size()));
        encoded.push_back({std::move(entries), std::move(one)});
      }
      const GatheredPlans plans(std::move(encoded), static_cast<std::size_t>(link_.coordinator()));
      remembered_->global = planner_.create_global_plan(plans);
      std::vector<Bytes> answers;
      for (std::size_t r = 0; r < plans.ranks(); ++r) {
        const std::uint64_t items = load_little_endian<std::uint64_t>(plans.items(r).data());
        answers.push_back(bits_of(remembered_->global.written.at(r), items));
      }
      return answers;
    };
    const Bytes bits = consult(link_, "plan the save", request, answer);
    remembered_->writes = from_bits(bits, plan_.size());
    remembered_->files_per_rank = options_.files_per_rank;
    remembered_->coordinator = link_.coordinator();
    remembered_->entries = std::move(entries_);
    remembered_->items = std::move(items_);
  }

  void finish() {
    bool known_to_have_failed = false;
    Bytes answer;  // one byte: whether any rank has a hook to call after the commit
    const std::string step = fmt::format("save to {}", storage_.name());
    try {
      answer = consult(
          link_, step, [&] { return write(); },
          [&](const std::vector<Bytes>& encoded) {
            std::vector<RankReport> reports;
            reports.reserve(encoded.size());
            for (const Bytes& one : encoded) reports.push_back(RankReport::decode(one));
            name_rank_of_error([&] { commit_all(reports); });
            const bool has_hook = std::any_of(reports.begin(), reports.end(),
                                              [](const RankReport& report) { return report.has_after_commit; });
            return std::vector<Bytes>(reports.size(), Bytes{static_cast<std::uint8_t>(has_hook ? 1 : 0)});
          },
          &known_to_have_failed);
    } catch (...) {
      if (known_to_have_failed) remove_created();
      if (options_.cache != nullptr) options_.cache->state_ = nullptr;
      throw;
    }
    if (options_.cache != nullptr) options_.cache->state_ = std::move(remembered_);
    if (answer.at(0) == 0) return;
    link_.agree_on(step + ": after the commit", [&] {
      if (options_.after_commit) options_.after_commit();
    });
  }

  // Writes this rank's files and makes them durable.
  Bytes write() {
    RankReport report;
    const RankItems items{state_, plan_, planner_, remembered_->writes};
    report.has_after_commit = options_.after_commit != nullptr;
    const std::vector<PlannedFile> files = format_->rank_files(items, link_.rank(), generation_, report);
    for (const PlannedFile& file : files) report_.written_bytes += file.size_bytes();
    ProgressSink& progress = options_.progress != nullptr ? *options_.progress : no_progress();
    progress.begin("save", report_.written_bytes);
    const std::size_t threads = options_.threads != 0 ? options_.threads : available_processors();
    if (!options_.transforms.empty()) {
      report_.written_bytes = write_transformed(files, *shared_storage_, options_, threads, progress, report, created_);
    } else {
      StreamWriter writer(shared_storage_, threads, progress, options_.cancellation);
      for (const PlannedFile& file : files) {
        writer.begin_file(file.name, file.size_bytes());
        created_.push_back(file.name);
        for (const PlannedUnit& unit : file.units) writer.add(unit.make());
        writer.end_file();
      }
      report.files = writer.finish();
    }
    if (!files.empty()) storage_.sync();
    progress.end();
    report_.files = created_;
    if (options_.before_commit) options_.before_commit();
    return report.encode();
  }

  // Runs `f` on the coordinator. Its errors reach all ranks, so they name it.
  template <typename F>
  void name_rank_of_error(const F& f) {
    const auto named = [&](const Error& error) {
      return link_.size() == 1 ? std::string(error.what())
                               : fmt::format("save to {}: rank {}: {}", storage_.name(), link_.rank(), error.what());
    };
    try {
      f();
    } catch (const OutcomeUnknown& error) {
      throw OutcomeUnknown(error.code(), named(error));
    } catch (const Error& error) {
      throw Error(error.code(), named(error));
    }
  }

  // Commits on the coordinator, after all ranks' files are durable.
  void commit_all(const std::vector<RankReport>& reports) {
    report_.not_removed =
        format_->commit(storage_, remembered_->global, reports, remembered_->files_of_rank, generation_);
  }

  void remove_created() {
    for (const std::string& name : created_) {
      try {
        storage_.remove(name);
      } catch (const Error&) {
        // The caller rethrows the save's own error. The next save removes the file.
      }
    }
  }

  const FlatState& state_;
  std::shared_ptr<Storage> shared_storage_;
  Storage& storage_;
  RankLink& link_;
  const WriteOptions& options_;
  SavePlanner default_planner_;
  SavePlanner& planner_;
  std::unique_ptr<SavePlanCache::State> not_remembered_;
  std::unique_ptr<SavePlanCache::State>& remembered_;
  std::unique_ptr<FormatWriter> format_;
  SavePlan plan_;
  Bytes entries_, items_;
  std::int64_t generation_ = 0;
  std::vector<std::string> created_;
  WriteReport report_;
};

WriteReport write_state(const FlatState& state, const std::shared_ptr<Storage>& storage, RankLink& link,
                        const WriteOptions& options) {
  return Saver(state, storage, link, options).run();
}

}  // namespace tessera::checkpoint
