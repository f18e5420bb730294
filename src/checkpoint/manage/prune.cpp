#include "tessera/checkpoint/manage/prune.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <system_error>
#include <utility>

#include "checkpoint/storage/directory_lock.h"
#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/checkpoint/internal/file_names.h"
#include "tessera/checkpoint/manage/run_directory.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;
namespace {

using EntryKind = RunEntry::Kind;
constexpr std::uint64_t kMaxReferenceBytes = 4096;

std::string text_of(const fs::path& path) {
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored) || fs::file_size(path, ignored) > kMaxReferenceBytes) return "";
  const Bytes bytes = read_file(path, kMaxReferenceBytes);
  std::string text(as_text(bytes));
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text;
}

// Returns the names of entries that something in the directory refers to, and what refers to them.
std::map<std::string, std::string> references(const RunDirectory& run) {
  std::map<std::string, std::string> found;
  std::error_code error;
  const fs::path root = fs::canonical(run.path, error);
  if (error) fail(ErrorCode::io, "find the absolute path of {}: {}", run.path.string(), error.message());
  for (fs::directory_iterator it(run.path, error), end; !error && it != end; it.increment(error)) {
    std::error_code failed;
    const bool is_link = it->is_symlink(failed);
    if (failed && failed != std::errc::no_such_file_or_directory) {
      fail(ErrorCode::io, "stat {}: {}", it->path().string(), failed.message());
    }
    if (!is_link) continue;
    const fs::path relative = fs::weakly_canonical(it->path(), failed).lexically_relative(root);
    if (!failed && !relative.empty()) found.try_emplace(relative.begin()->string(), it->path().filename().string());
  }
  if (error) fail(ErrorCode::io, "list {}: {}", run.path.string(), error.message());
  const std::string latest = text_of(run.path / "latest");
  if (!latest.empty()) found.try_emplace(latest, "latest");
  constexpr const char* kOfMegatron = "latest_checkpointed_iteration.txt";
  if (const auto iteration = parse_step_name(text_of(run.path / kOfMegatron))) {
    for (const RunEntry& entry : run.entries) {
      if (entry.of.step == iteration->step) found.try_emplace(entry.name, kOfMegatron);
    }
  }
  return found;
}

class Pruning {
 public:
  Pruning(RunDirectory run, const PruneOptions& options)
      : run_(std::move(run)), options_(options), references_(references(run_)) {
    check_units();
    std::size_t kept = 0;
    for (std::size_t i = run_.entries.size(); i-- > 0 && kept < options_.keep;) {
      if (!run_.entries[i].complete) continue;
      newest_.insert(i);
      ++kept;
    }
  }

  PruneReport run() {
    for (std::size_t i = 0; i < run_.entries.size(); ++i) {
      if (options_.cancellation != nullptr) options_.cancellation->check();
      const RunEntry& entry = run_.entries[i];
      std::string why_kept, why_removed;
      decide(i, why_kept, why_removed);
      if (!why_removed.empty()) remove({entry.name, std::move(why_removed), entry.size_bytes});
      if (!why_kept.empty()) report_.kept.push_back({entry.name, std::move(why_kept)});
    }
    if (!options_.dry_run && !report_.removed.empty()) sync_directory(run_.path);
    return std::move(report_);
  }

 private:
  // Numbers of epochs and of steps have no common order, so none of them is the newest.
  void check_units() const {
    const RunEntry* first = nullptr;
    for (const RunEntry& entry : run_.entries) {
      if (!entry.complete) continue;
      if (first == nullptr) first = &entry;
      if (entry.of.unit == first->of.unit) continue;
      fail(ErrorCode::invalid_argument,
           "prune {}: found the steps '{}' and '{}', expected names of one kind, whose numbers can be compared; "
           "move one kind to another directory",
           run_.path.string(), printable(first->name), printable(entry.name));
    }
  }

  // Returns why an incomplete step may be newer than the newest complete one, or nothing if it is older.
  std::string why_it_may_be_new(const StepName& of) const {
    if (!run_.newest_complete) return "no step is complete, and it may be being written";
    const RunEntry& newest = run_.entries[*run_.newest_complete];
    if (of.unit != newest.of.unit) {
      return fmt::format("its number cannot be compared with that of '{}', and it may be being written",
                         printable(newest.name));
    }
    return of.step < newest.of.step ? "" : "newer than the newest complete step, and may be being written";
  }

  // Sets one of the reasons.
  void decide(std::size_t i, std::string& why_kept, std::string& why_removed) const {
    const RunEntry& entry = run_.entries[i];
    const auto reference = references_.find(entry.name);
    const bool is_ours = entry.kind == EntryKind::step || parse_staging_name(entry.name);
    std::string why_new = why_it_may_be_new(entry.of);
    if (entry.kind == EntryKind::removed) {
      why_removed = "removed before";
    } else if (entry.kind == EntryKind::link) {
      why_kept = entry.problem;
    } else if (newest_.contains(i)) {
      why_kept = "newest";
    } else if (entry.in_use) {
      why_kept = "being written";
    } else if (reference != references_.end()) {
      why_kept = fmt::format("'{}' refers to it", printable(reference->second));
    } else if (entry.kind == EntryKind::step && options_.every && entry.of.step % *options_.every == 0) {
      why_kept = fmt::format("a multiple of {}", *options_.every);
    } else if (entry.complete) {
      why_removed = "old";
    } else if (!is_ours || (entry.kind == EntryKind::step && !entry.format)) {
      why_kept = entry.problem;
    } else if (!why_new.empty()) {
      why_kept = std::move(why_new);
    } else if (!options_.incomplete) {
      why_kept = entry.problem;
    } else {
      why_removed = entry.kind == EntryKind::staging ? "unfinished" : "incomplete";
    }
  }

  void remove(PrunedEntry entry) {
    if (options_.dry_run) {
      take(std::move(entry));
      return;
    }
    try {
      const fs::path path = run_.path / entry.name;
      DirectoryLock lock;
      if (parse_removed_name(entry.name)) {
        finish_removals(run_.path);
      } else {
        if (parse_staging_name(entry.name) && !(lock = DirectoryLock::try_lock(path))) {
          report_.kept.push_back({entry.name, "being written"});
          return;
        }
        remove_step(run_.path, entry.name);
      }
      take(std::move(entry));
    } catch (const Error& error) {
      // Another process removed it.
      if (error.code() != ErrorCode::not_found) report_.failed.push_back(error.what());
    }
  }

  void take(PrunedEntry entry) {
    report_.freed_bytes += entry.size_bytes;
    if (options_.removed) options_.removed(entry);
    report_.removed.push_back(std::move(entry));
  }

  const RunDirectory run_;
  const PruneOptions& options_;
  const std::map<std::string, std::string> references_;  // by the names of entries
  std::set<std::size_t> newest_;                         // the complete steps that are kept as such
  PruneReport report_;
};

}  // namespace

PruneReport prune(const fs::path& directory, const PruneOptions& options) {
  if (options.keep < 1) {
    fail(ErrorCode::invalid_argument, "prune {}: keep is 0, expected at least 1", directory.string());
  }
  if (options.every && *options.every < 1) {
    fail(ErrorCode::invalid_argument, "prune {}: every is {}, expected at least 1", directory.string(), *options.every);
  }
  return Pruning(list_run(directory, options.cancellation), options).run();
}

}  // namespace tessera::checkpoint
