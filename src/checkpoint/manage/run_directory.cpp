#include "tessera/checkpoint/manage/run_directory.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "checkpoint/source/foreign.h"
#include "checkpoint/source/shard_index.h"
#include "checkpoint/source/source.h"
#include "checkpoint/storage/directory_lock.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/internal/checkpoint_files.h"
#include "tessera/checkpoint/sidecar.h"
#include "tessera/format/torch_archive.h"
#include "tessera/format/zip.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;
namespace {

// Returns what a staging name of tessera or of another trainer stages, or nothing.
std::optional<StepName> staged_step(std::string_view name) {
  if (const auto staging = parse_staging_name(name)) return parse_step_name(staging->name);
  for (const std::string_view prefix : {"tmp-", "tmp_", ".tmp-"}) {
    if (name.starts_with(prefix)) return parse_step_name(name.substr(prefix.size()));
  }
  if (name.starts_with('.')) name.remove_prefix(1);
  for (const std::string_view suffix : {".partial", ".tmp", "_tmp", ".incomplete"}) {
    if (name.ends_with(suffix)) return parse_step_name(name.substr(0, name.size() - suffix.size()));
  }
  return std::nullopt;
}

// What the file system tells about an entry and all that is in it.
struct TreeFacts {
  std::uint64_t size_bytes = 0;
  std::int64_t modified_s = 0;        // of the newest file; of the entry itself if it has none
  bool in_use = false;                // a folder in it is locked
  std::vector<fs::path> torch_files;  // by their endings
};

class TreeWalk {
 public:
  TreeWalk(const fs::path& path, const Cancellation* cancellation) : cancellation_(cancellation) {
    std::error_code error;
    if (fs::is_directory(fs::symlink_status(path, error))) {
      fs::recursive_directory_iterator it(path, error);
      for (const fs::recursive_directory_iterator end; !error && it != end; it.increment(error)) take(it->path());
      if (error) fail(ErrorCode::io, "list {}: {}", path.string(), error.message());
    } else {
      take(path);
    }
    struct stat status = {};
    if (facts_.modified_s == 0 && ::lstat(path.c_str(), &status) == 0) facts_.modified_s = status.st_mtim.tv_sec;
  }
  const TreeFacts& facts() const { return facts_; }

 private:
  void take(const fs::path& path) {
    if (cancellation_ != nullptr) cancellation_->check();
    struct stat status = {};
    if (::lstat(path.c_str(), &status) != 0) return;  // removed meanwhile
    const std::string name = path.filename().string();
    if (S_ISDIR(status.st_mode) && parse_staging_name(name)) {
      facts_.in_use = facts_.in_use || !DirectoryLock::try_lock(path);
    }
    if (!S_ISREG(status.st_mode)) return;
    facts_.size_bytes += static_cast<std::uint64_t>(status.st_size);
    if (!name.ends_with(kSidecarFileName)) {
      facts_.modified_s = std::max<std::int64_t>(facts_.modified_s, status.st_mtim.tv_sec);
    }
    if (has_torch_ending(name)) facts_.torch_files.push_back(path);
  }

  const Cancellation* cancellation_;
  TreeFacts facts_;
};

// Throws Error(corrupt) unless all data that the description names is in its files.
void check_files_hold_the_data(const Checkpoint& checkpoint) {
  const auto check = [&](const StoredRange& stored, const std::string& name) {
    if (stored.file == StoredRange::kNoFile) return;
    const SourceFile& file = checkpoint.files()[stored.file];
    if (!file.size_bytes) {
      fail(ErrorCode::corrupt, "'{}' is missing, expected it for '{}'", printable(file.name), printable(name));
    }
    if (stored.offset_bytes <= *file.size_bytes && stored.length_bytes <= *file.size_bytes - stored.offset_bytes)
      return;
    fail(ErrorCode::corrupt, "'{}' ends at byte {}, before the data of '{}', expected all of it", printable(file.name),
         *file.size_bytes, printable(name));
  };
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    for (const StoredRange& stored : tensor.stored) check(stored, tensor.name);
  }
  for (const ObjectInfo& object : checkpoint.objects()) check(object.stored, object.name);
}

bool has_directory_at(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

bool is_torch_file(const fs::path& path) {
  const File file = File::open_read(path);
  Bytes first(std::min<std::uint64_t>(file.size_bytes(), 64));
  file.read_at(0, first);
  return zip::looks_like_zip(first) || torch_archive::looks_like_legacy(first);
}

// Throws Error(corrupt) if names such as "model-00001-of-00002.bin" announce files that are not there.
void check_no_shard_is_missing(const std::vector<fs::path>& files) {
  std::map<fs::path, std::vector<std::string>> names;  // by directory
  for (const fs::path& file : files) names[file.parent_path()].push_back(file.filename().string());
  for (const auto& [directory, of_directory] : names) {
    const std::set<std::string> missing = missing_shards(of_directory).lost;
    if (missing.empty()) continue;
    fail(ErrorCode::corrupt, "'{}' is missing, expected {} more files, which the names of the others announce",
         printable(*missing.begin()), missing.size());
  }
}

// Throws Error(corrupt) if a file is a zip archive and not complete.
void check_archive_is_complete(const fs::path& path) {
  const File file = File::open_read(path);
  if (zip::looks_like_zip(file)) zip::read_directory(file, 0, file.size_bytes());
}

std::optional<SourceKind> format_of(const fs::path& path, const TreeFacts& facts) {
  if (!has_directory_at(path)) {
    if (path.string().ends_with(kSafetensorsSuffix)) return SourceKind::safetensors;
    return is_torch_file(path) ? std::optional(SourceKind::torch) : std::nullopt;
  }
  if (const auto kind = directory_kind(*file_system_storage(path))) return kind;
  return std::ranges::any_of(facts.torch_files, is_torch_file) ? std::optional(SourceKind::torch) : std::nullopt;
}

// Throws Error unless the step at `path` is complete. Returns how many ranks wrote it, if that is known.
std::optional<std::size_t> check_step(const fs::path& path, const TreeFacts& facts) {
  std::set<std::int64_t> ranks;
  if (!has_directory_at(path) || directory_kind(*file_system_storage(path))) {
    OpenOptions options;
    options.check_checksums = false;  // sizes tell whether a save was completed
    const auto opened = Checkpoint::open(path, options);
    check_files_hold_the_data(*opened);
    for (std::size_t i = 0; i < opened->tensors().size(); ++i) opened->check_partition(i);
    for (const SourceFile& file : opened->files()) {
      if (file.rank) ranks.insert(*file.rank);
    }
  }
  check_no_shard_is_missing(facts.torch_files);
  for (const fs::path& file : facts.torch_files) check_archive_is_complete(file);
  return ranks.empty() ? std::nullopt : std::optional(ranks.size());
}

// Verifies each checkpoint of a step: that of the directory, and the files of torch.save in it.
std::vector<std::string> problems_of(const fs::path& path, const VerifyOptions& options) {
  std::vector<std::string> problems;
  const auto check = [&](const fs::path& checkpoint) {
    for (const Problem& problem : verify(checkpoint, options).problems) problems.push_back(problem.what);
  };
  const bool is_directory = has_directory_at(path);
  if (!is_directory || directory_kind(*file_system_storage(path))) check(path);
  if (!is_directory) return problems;
  const TreeFacts facts = TreeWalk(path, options.cancellation).facts();
  for (const fs::path& file : facts.torch_files) {
    if (zip::looks_like_zip(File::open_read(file))) check(file);
  }
  return problems;
}

// Returns a message without the path of the step, which is known where it is shown.
std::string without_path(std::string message, const std::string& path) {
  for (const char* separator : {"/", ": "}) {
    const std::string prefix = path + separator;
    if (message.starts_with(prefix)) return message.substr(prefix.size());
  }
  return message;
}

void describe_step(const fs::path& path, const TreeFacts& facts, RunEntry& entry) {
  try {
    entry.format = format_of(path, facts);
    if (!entry.format) {
      entry.problem = "no checkpoint in it";
      return;
    }
    entry.ranks = check_step(path, facts);
    entry.complete = true;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::cancelled) throw;
    entry.problem = without_path(error.what(), path.string());
    // Only what contradicts itself is known to be incomplete.
    if (error.code() != ErrorCode::corrupt) entry.format.reset();
  }
}

std::optional<RunEntry> named_entry(const fs::path& path) {
  RunEntry entry;
  entry.name = path.filename().string();
  std::error_code ignored;
  const fs::file_status status = fs::symlink_status(path, ignored);
  const bool is_directory = fs::is_directory(status);
  if (const auto removed = parse_removed_name(entry.name)) {
    entry.kind = RunEntry::Kind::removed;
    entry.of = parse_step_name(removed->name).value_or(StepName());
    return entry;
  }
  if (const auto step = parse_step_name(entry.name)) {
    const bool is_file = fs::is_regular_file(status) && !checkpoint_file_ending(entry.name).empty();
    if (!fs::is_symlink(status) && !is_directory && !is_file) return std::nullopt;
    entry.kind = fs::is_symlink(status) ? RunEntry::Kind::link : RunEntry::Kind::step;
    entry.of = *step;
    return entry;
  }
  const auto staged = staged_step(entry.name);
  if (!staged || fs::is_symlink(status)) return std::nullopt;
  entry.kind = RunEntry::Kind::staging;
  entry.of = *staged;
  return entry;
}

void describe(const fs::path& path, RunEntry& entry, const Cancellation* cancellation) {
  if (entry.kind == RunEntry::Kind::link) {
    std::error_code error;
    entry.problem = fmt::format("a symbolic link to {}", fs::read_symlink(path, error).string());
    return;
  }
  TreeFacts facts;
  try {
    facts = TreeWalk(path, cancellation).facts();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::cancelled) throw;
    entry.problem = without_path(error.what(), path.string());
    return;
  }
  entry.size_bytes = facts.size_bytes;
  entry.modified_s = facts.modified_s;
  entry.in_use = facts.in_use;
  switch (entry.kind) {
    case RunEntry::Kind::step:
      return describe_step(path, facts, entry);
    case RunEntry::Kind::staging:
      entry.in_use = entry.in_use || (parse_staging_name(entry.name) && !DirectoryLock::try_lock(path));
      entry.problem = entry.in_use ? "being written" : "unfinished: its writer ended, or is another program";
      return;
    case RunEntry::Kind::removed:
      entry.problem = "its removal was interrupted";
      return;
    case RunEntry::Kind::link:
      return;
  }
}

}  // namespace

bool is_run_directory(const fs::path& path) {
  std::error_code error;
  if (!fs::is_directory(path, error) || directory_kind(*file_system_storage(path))) return false;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    if (named_entry(it->path())) return true;
  }
  return false;
}

RunDirectory list_run(const fs::path& directory, const Cancellation* cancellation) {
  if (!fs::is_directory(require_present(directory))) {
    fail(ErrorCode::not_found, "{}: found a file, expected the directory of a run", directory.string());
  }
  std::error_code error;
  RunDirectory run;
  run.path = directory;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (auto entry = named_entry(it->path())) run.entries.push_back(std::move(*entry));
  }
  if (error) fail(ErrorCode::io, "list {}: {}", directory.string(), error.message());
  std::ranges::sort(run.entries, [](const RunEntry& a, const RunEntry& b) {
    return std::tie(a.of.step, a.name) < std::tie(b.of.step, b.name);
  });
  for (std::size_t i = 0; i < run.entries.size(); ++i) {
    describe(directory / run.entries[i].name, run.entries[i], cancellation);
    if (run.entries[i].complete) run.newest_complete = i;
  }
  return run;
}

std::size_t verify_steps(RunDirectory& run, const VerifyOptions& options) {
  std::size_t damaged = 0;
  run.newest_complete.reset();
  for (std::size_t i = 0; i < run.entries.size(); ++i) {
    RunEntry& entry = run.entries[i];
    if (entry.kind != RunEntry::Kind::step || !entry.format) continue;
    const fs::path path = run.path / entry.name;
    const bool was_complete = std::exchange(entry.complete, false);
    if (was_complete) {
      const std::vector<std::string> problems = problems_of(path, options);
      entry.complete = problems.empty();
      if (!entry.complete) {
        ++damaged;
        entry.problem = without_path(problems[0], path.string());
        if (problems.size() > 1) entry.problem += fmt::format("; and {} more problems", problems.size() - 1);
      }
    }
    if (entry.complete) run.newest_complete = i;
  }
  return damaged;
}

}  // namespace tessera::checkpoint
