#include <algorithm>
#include <utility>

#include "checkpoint/byte_cursor.h"
#include "checkpoint/save/format.h"
#include "checkpoint/save/transformed_files.h"
#include "tessera/base/error.h"
#include "tessera/base/thread_pool.h"
#include "tessera/checkpoint/internal/save_steps.h"

namespace tessera::checkpoint {
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

SaveSteps::SaveSteps(const FlatState& state, std::shared_ptr<Storage> storage, const WriteOptions& options)
    : state_(state),
      shared_storage_(std::move(storage)),
      storage_(*shared_storage_),
      options_(options),
      planner_(options.planner != nullptr ? *options.planner : default_planner_),
      format_(make_writer(options)) {}
SaveSteps::~SaveSteps() = default;

void SaveSteps::make_plan() {
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
}

Bytes SaveSteps::plan_message(bool omits_entries) const {
  Bytes message;
  append_little_endian<std::uint64_t>(message, options_.files_per_rank);
  append_text(message, omits_entries ? std::string_view() : as_text(entries_));
  append(message, items_);
  return message;
}

std::int64_t SaveSteps::begin_generation() { return format_->begin(storage_); }

std::vector<Bytes> SaveSteps::merge(std::vector<Bytes> messages, std::size_t reference, MergedPlans& merged) {
  std::vector<GatheredPlans::Encoded> encoded;
  for (Bytes& message : messages) {
    ByteCursor cursor(message, "save plan");
    merged.files_of_rank.push_back(cursor.number<std::uint64_t>());
    const ByteView view = as_bytes(cursor.text());
    Bytes entries(view.begin(), view.end());
    message.erase(message.begin(), message.end() - static_cast<std::ptrdiff_t>(cursor.rest().size()));
    encoded.push_back({std::move(entries), std::move(message)});
  }
  const GatheredPlans plans(std::move(encoded), reference);
  merged.global = planner_.create_global_plan(plans);
  std::vector<Bytes> answers;
  for (std::size_t r = 0; r < plans.ranks(); ++r) {
    const std::uint64_t items = load_little_endian<std::uint64_t>(plans.items(r).data());
    answers.push_back(bits_of(merged.global.written.at(r), items));
  }
  return answers;
}

std::vector<Bytes> SaveSteps::answer_plans(std::vector<Bytes> messages, MergedPlans& merged, std::int64_t& generation) {
  generation = begin_generation();
  const std::vector<Bytes> writes = merge(std::move(messages), 0, merged);
  std::vector<Bytes> answers;
  for (std::size_t rank = 0; rank < writes.size(); ++rank) {
    Bytes& answer = answers.emplace_back();
    append_little_endian(answer, static_cast<std::uint64_t>(generation));
    append_little_endian(answer, static_cast<std::uint32_t>(rank));
    append(answer, writes[rank]);
  }
  return answers;
}

std::vector<std::uint32_t> SaveSteps::writes_of(ByteView answer) const { return from_bits(answer, plan_.size()); }

SaveSteps::Answer SaveSteps::read_answer(ByteView answer) const {
  ByteCursor cursor(answer, "answer to a save plan");
  const auto generation = static_cast<std::int64_t>(cursor.number<std::uint64_t>());
  const auto rank = static_cast<int>(cursor.number<std::uint32_t>());
  return {generation, rank, writes_of(cursor.rest())};
}

Bytes SaveSteps::write(std::span<const std::uint32_t> writes, int rank, std::int64_t generation) {
  RankReport report;
  const RankItems items{state_, plan_, planner_, writes};
  report.has_after_commit = options_.after_commit != nullptr;
  const std::vector<PlannedFile> files = format_->rank_files(items, rank, generation, report);
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

void SaveSteps::remove_created() noexcept {
  for (const std::string& name : created_) {
    try {
      storage_.remove(name);
    } catch (...) {
      // The caller reports the save's own error. The next save removes the file.
    }
  }
}

bool SaveSteps::commit(const std::vector<Bytes>& reports, MergedPlans& merged, std::int64_t generation) {
  std::vector<RankReport> decoded;
  decoded.reserve(reports.size());
  for (const Bytes& report : reports) decoded.push_back(RankReport::decode(report));
  report_.not_removed = format_->commit(storage_, merged.global, decoded, merged.files_of_rank, generation);
  created_.clear();
  return std::any_of(decoded.begin(), decoded.end(), [](const RankReport& report) { return report.has_after_commit; });
}

}  // namespace tessera::checkpoint
