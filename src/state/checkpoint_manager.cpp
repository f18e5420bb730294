#include "tessera/state/checkpoint_manager.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <utility>

#include "state/local_state.h"
#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/checkpoint/internal/file_names.h"
#include "tessera/checkpoint/manage/run_directory.h"
#include "tessera/checkpoint/sidecar.h"
#include "tessera/comm/internal/step.h"

namespace tessera {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

namespace {

// The metrics of the steps: {"100": 0.25, ...}.
constexpr std::string_view kMetrics = "metrics.json";

// Returns the step that a name stands for which this class gives, or nothing for other names of steps.
std::optional<std::int64_t> step_of(const std::string& name) {
  const auto parsed = checkpoint::parse_step_name(name);
  return parsed && checkpoint::step_name(parsed->step) == name ? std::optional(parsed->step) : std::nullopt;
}

// Throws Error(io) if it is not known whether the file exists: one that cannot be looked up may be there.
bool is_present(const fs::path& path) {
  std::error_code error;
  const bool found = fs::exists(path, error);
  if (error) fail(ErrorCode::io, "stat {}: {}", path.string(), error.message());
  return found;
}

struct Found {
  std::int64_t step;
  bool is_committed;
};

std::vector<Found> find_steps(const fs::path& directory) {
  std::vector<Found> found;
  for (const checkpoint::NamedStep& named : checkpoint::find_steps(directory)) {
    if (const auto step = step_of(named.name)) {
      found.push_back({*step, is_present(directory / named.name / checkpoint::kMetadataFileName)});
    }
  }
  return found;
}

// Returns the name of an entry that no unfinished save leaves in the directory of a step, or nothing.
std::optional<std::string> foreign_entry(const fs::path& step) {
  std::optional<std::string> found;
  std::error_code error;
  for (fs::directory_iterator it(step, error), end; !error && it != end && !found; it.increment(error)) {
    std::string name = it->path().filename().string();
    const bool is_of_a_save = checkpoint::may_be_left_by_a_save(name) || name == checkpoint::kSidecarFileName;
    if (!is_of_a_save) found = std::move(name);
  }
  if (error) fail(ErrorCode::io, "list {}: {}", step.string(), error.message());
  return found;
}

std::map<std::int64_t, double> read_metrics(const fs::path& path) {
  std::map<std::int64_t, double> metrics;
  if (!is_present(path)) return metrics;
  const Bytes bytes = read_file(path, 64 << 20);
  const Json json = Json::parse(bytes.begin(), bytes.end(), nullptr, false);
  if (!json.is_object()) return metrics;  // a damaged file: no step has a metric
  for (const auto& [key, value] : json.items()) {
    const auto step = step_of("step-" + key);
    if (!step || !value.is_number()) continue;  // null stands for a number that was not finite
    if (const double metric = value; std::isfinite(metric)) metrics[*step] = metric;
  }
  return metrics;
}

void write_metrics(const fs::path& path, const std::map<std::int64_t, double>& metrics) {
  Json json = Json::object();
  for (const auto& [step, metric] : metrics) json[fmt::to_string(step)] = metric;
  const fs::path temporary = path.string() + ".tmp";
  std::error_code ignored;
  fs::remove(temporary, ignored);
  write_new_file(temporary, as_bytes(json.dump(1) + "\n"));
  rename_replacing(temporary, path);
}

}  // namespace

CheckpointManager::CheckpointManager(fs::path directory, const ProcessGroup& group, CheckpointManagerOptions options)
    : directory_(std::move(directory)), group_(group), options_(std::move(options)) {
  group_.check_call("make a CheckpointManager", [&](CallArguments& arguments) {
    if (options_.save_every < 1) {
      fail(ErrorCode::invalid_argument, "checkpoint manager: save_every is {}, expected at least 1",
           options_.save_every);
    }
    if (options_.keep_last == std::size_t{0}) {
      fail(ErrorCode::invalid_argument, "checkpoint manager: keep_last is 0, expected at least 1");
    }
    if (options_.save.format != checkpoint::SaveFormat::dcp) {
      fail(ErrorCode::invalid_argument, "checkpoint manager: save.format is safetensors, expected dcp");
    }
    arguments.add("directory", last_name_of(checkpoint::file_system_storage(directory_)))
        .add("save_every", options_.save_every)
        .add("async", options_.async);
  });
  group_.agree_on(fmt::format("open the checkpoint directory {}", directory_.string()), [&] {
    if (group_.rank() != 0) return;
    std::error_code error;
    fs::create_directories(directory_, error);
    if (error) fail(ErrorCode::io, "create directory {}: {}", directory_.string(), error.message());
    remove_uncommitted();
  });
  if (options_.async) saver_ = std::make_unique<AsyncSaver>(group_, options_.save);
}

CheckpointManager::~CheckpointManager() = default;

void CheckpointManager::warn(const std::string& what) const {
  if (options_.warn && group_.rank() == 0) options_.warn(what);
}

void CheckpointManager::remove_uncommitted() const {
  for (const Found& found : find_steps(directory_)) {
    if (found.is_committed) continue;
    const std::string name = checkpoint::step_name(found.step);
    if (const std::optional<std::string> foreign = foreign_entry(directory_ / name)) {
      warn(fmt::format("{} has no {} and stays: found '{}' in it, expected only what an unfinished save leaves", name,
                       checkpoint::kMetadataFileName, printable(*foreign)));
    } else {
      checkpoint::remove_step(directory_, name);
    }
  }
  checkpoint::finish_removals(directory_);
}

fs::path CheckpointManager::path_of(std::int64_t step) const { return directory_ / checkpoint::step_name(step); }

std::vector<std::int64_t> CheckpointManager::steps() const {
  std::vector<std::int64_t> steps;
  for (const Found& found : find_steps(directory_)) {
    if (found.is_committed) steps.push_back(found.step);
  }
  return steps;
}

std::optional<std::int64_t> CheckpointManager::latest() const {
  const std::vector<std::int64_t> all = steps();
  return all.empty() ? std::nullopt : std::optional(all.back());
}

bool CheckpointManager::save(std::int64_t step, const StateDict& state, std::optional<double> metric, bool always) {
  comm::in_step(std::span(&group_, 1), "save of a CheckpointManager", [&] {
    if (step >= 0) return;
    fail(ErrorCode::invalid_argument, "checkpoint manager: save of step {}, expected a step of at least 0", step);
  });
  if (!always && !is_due(step)) return false;
  const auto storage = checkpoint::file_system_storage(path_of(step));
  if (saver_ != nullptr) {
    saver_->save(state, storage, [this, step, metric] { after_save(step, metric); });
  } else {
    tessera::save(state, storage, group_, options_.save);
    after_save(step, metric);
  }
  return true;
}

// Removes checkpoints that are no longer kept. The checkpoint of `step` is committed, so errors here are only warnings.
void CheckpointManager::after_save(std::int64_t step, std::optional<double> metric) const {
  if (group_.rank() != 0) return;
  const double value = metric.value_or(std::numeric_limits<double>::quiet_NaN());
  if (metric && !std::isfinite(value)) {
    warn(fmt::format("the metric of step {} is {}, expected a finite number: the step has none", step, value));
  }
  try {
    sync_directory(directory_);
    const fs::path path = directory_ / kMetrics;
    std::map<std::int64_t, double> metrics = read_metrics(path);
    const auto before = metrics;
    metrics.erase(step);
    if (std::isfinite(value)) metrics[step] = value;
    const std::vector<std::int64_t> all = steps();
    std::erase_if(metrics, [&](const auto& one) { return !std::binary_search(all.begin(), all.end(), one.first); });

    std::set<std::int64_t> kept = {step};
    const std::size_t last = std::min(options_.keep_last.value_or(all.size()), all.size());
    kept.insert(all.end() - static_cast<std::ptrdiff_t>(last), all.end());
    std::vector<std::pair<double, std::int64_t>> ranked;
    ranked.reserve(metrics.size());
    for (const auto& [of_step, of] : metrics) {
      ranked.emplace_back(options_.best == CheckpointManagerOptions::Best::lowest ? of : -of, -of_step);
    }
    std::sort(ranked.begin(), ranked.end());
    for (std::size_t i = 0; i < std::min(options_.keep_best, ranked.size()); ++i) kept.insert(-ranked[i].second);
    if (metrics != before) write_metrics(path, metrics);
    for (const std::int64_t old : all) {
      if (!kept.contains(old)) checkpoint::remove_step(directory_, checkpoint::step_name(old));
    }
  } catch (const Error& error) {
    warn(error.what());
  }
}

void CheckpointManager::wait() {
  if (saver_ != nullptr) saver_->wait();
}

void CheckpointManager::restore(std::int64_t step, StateDict& state) {
  load(state, path_of(step), group_, options_.load);
}

std::optional<std::int64_t> CheckpointManager::restore_latest(StateDict& state) {
  group_.check_call("restore the latest checkpoint", [](CallArguments&) {});
  const Bytes encoded_steps =
      group_.broadcast_bytes(group_.agree_on(fmt::format("list the checkpoints in {}", directory_.string()),
                                             [&] {
                                               Bytes bytes;
                                               if (group_.rank() != 0) return bytes;
                                               for (const std::int64_t step : steps()) {
                                                 append_little_endian(bytes, static_cast<std::uint64_t>(step));
                                               }
                                               return bytes;
                                             }),
                             0);
  std::string damaged;
  for (std::size_t at = encoded_steps.size(); at > 0; at -= 8) {
    const auto step = static_cast<std::int64_t>(load_little_endian<std::uint64_t>(encoded_steps.data() + at - 8));
    try {
      restore(step, state);
      return step;
    } catch (const Error& error) {
      const bool is_damage = error.code() == ErrorCode::corrupt || error.code() == ErrorCode::io;
      if (!is_damage) throw;
      warn(fmt::format("skipped the damaged checkpoint of step {}: {}", step, error.what()));
      if (damaged.empty()) damaged = error.what();
    }
  }
  if (!damaged.empty()) {
    fail(ErrorCode::corrupt,
         "restore the latest checkpoint of {}: all {} checkpoints are damaged, expected an intact one; the newest: {}",
         directory_.string(), encoded_steps.size() / 8, damaged);
  }
  return std::nullopt;
}

}  // namespace tessera
