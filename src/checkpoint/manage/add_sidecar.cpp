#include "tessera/checkpoint/manage/add_sidecar.h"

#include <sys/stat.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/buffer.h"
#include "checkpoint/save/commit.h"
#include "checkpoint/source/shard_index.h"
#include "tessera/base/crc32.h"
#include "tessera/base/error.h"
#include "tessera/base/thread_pool.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/internal/file_names.h"
#include "tessera/checkpoint/sidecar.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;
namespace {

constexpr std::uint64_t kSummedBytes = 32 * Sidecar::kBlockBytes;

// What changes when a file is written to.
using FileState = std::tuple<ino_t, off_t, std::int64_t, std::int64_t>;

FileState state_of_file(const fs::path& path) {
  struct stat status = {};
  if (::stat(path.c_str(), &status) != 0) fail(ErrorCode::io, "stat {}: the file was removed", path.string());
  return {status.st_ino, status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec};
}

// A file whose blocks threads sum up.
struct SummedFile {
  std::string name;
  fs::path path;
  FileState before;
  std::uint64_t size_bytes = 0;
  std::vector<std::uint32_t> block_crcs;
};

fs::path directory_of_files(const fs::path& checkpoint) {
  return checkpoint_directory(checkpoint).value_or(checkpoint.parent_path());
}

class Summing {
 public:
  Summing(const fs::path& checkpoint, const AddSidecarOptions& options)
      : directory_(directory_of_files(checkpoint)),
        options_(options),
        progress_(options.progress != nullptr ? *options.progress : no_progress()),
        pool_(threads_for(options.jobs)) {}

  Sidecar run(const std::vector<std::string>& names) {
    std::uint64_t total = 0;
    for (const std::string& name : names) {
      auto& file = *files_.emplace_back(std::make_unique<SummedFile>());
      file.name = name;
      file.path = directory_ / name;
      file.before = state_of_file(file.path);
      total += file.size_bytes = static_cast<std::uint64_t>(std::get<1>(file.before));
    }
    progress_.begin("sum", total);
    for (const auto& file : files_) submit(*file);
    pool_.wait();
    progress_.end();
    Sidecar sidecar;
    for (const auto& file : files_) {
      sidecar.files[file->name] = facts_of_blocks(file->size_bytes, std::move(file->block_crcs));
    }
    return sidecar;
  }

  // Throws Error(io) if a file is no longer as it was when run() began.
  void require_unchanged() const {
    for (const auto& file : files_) {
      if (state_of_file(file->path) == file->before) continue;
      fail(ErrorCode::io, "sum {}: the file was changed meanwhile, expected that no program writes to the checkpoint",
           file->path.string());
    }
  }

 private:
  void submit(SummedFile& file) {
    file.block_crcs.resize((file.size_bytes + Sidecar::kBlockBytes - 1) / Sidecar::kBlockBytes);
    const auto opened = std::make_shared<const File>(File::open_read(file.path));
    for (std::uint64_t begin = 0; begin < file.size_bytes; begin += kSummedBytes) {
      const std::uint64_t end = std::min(begin + kSummedBytes, file.size_bytes);
      pool_.submit([this, &file, opened, begin, end] {
        if (options_.cancellation != nullptr) options_.cancellation->check();
        sum_blocks(*opened, begin, end, file.block_crcs);
        progress_.advance(end - begin);
      });
    }
  }

  static void sum_blocks(const File& file, std::uint64_t begin, std::uint64_t end, std::vector<std::uint32_t>& crcs) {
    thread_local Buffer buffer;
    const MutableByteView piece = buffer.get(end - begin);
    file.read_at(begin, piece);
    for (std::uint64_t at = begin; at < end; at += Sidecar::kBlockBytes) {
      const std::uint64_t length = std::min(Sidecar::kBlockBytes, end - at);
      crcs[at / Sidecar::kBlockBytes] = crc32(piece.subspan(at - begin, length));
    }
  }

  fs::path directory_;
  const AddSidecarOptions& options_;
  ProgressSink& progress_;
  std::vector<std::unique_ptr<SummedFile>> files_;
  ThreadPool pool_;  // last: its threads use all of the above
};

std::vector<std::string> names_of_files(const Checkpoint& checkpoint) {
  std::vector<std::string> names = checkpoint.description_files();
  for (const SourceFile& file : checkpoint.files()) {
    if (file.size_bytes) names.push_back(file.name);
  }
  return names;
}

// Writes a file under a temporary name, which a killed process may leave and the next call replaces.
void replace_file(const fs::path& path, ByteView contents) {
  const fs::path temporary = path.string() + std::string(kTemporarySuffix);
  std::error_code ignored;
  fs::remove(temporary, ignored);
  write_new_file(temporary, contents);
  rename_replacing(temporary, path);
  sync_directory(path.has_parent_path() ? path.parent_path() : fs::path("."));
}

// Replaces the sidecar of a directory, between saves: its files do not change meanwhile. A save completes what it finds
// under the temporary name, which therefore must be right from the start.
void replace_sidecar(Storage& storage, const SaveTurn& turn, const Summing& summing, const Sidecar& sidecar) {
  CommitLock lock(storage, turn);
  try {
    summing.require_unchanged();
    lock.take_between_saves(write_sidecar(sidecar));
    summing.require_unchanged();
    storage.sync();
    lock.require_held();
    lock.become_sidecar(sidecar);
    storage.sync();
  } catch (...) {
    lock.release();
    throw;
  }
}

// A directory with several indices has one sidecar. Adds what it has about files that are not of `index`.
void keep_facts_of_others(const fs::path& index, Sidecar& sidecar) {
  try {
    const std::optional<Sidecar> before = read_sidecar(index);
    if (!before) return;
    for (const auto& [name, facts] : before->files) {
      std::error_code ignored;
      if (fs::exists(directory_of_files(index) / name, ignored)) sidecar.files.try_emplace(name, facts);
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::corrupt) throw;  // a damaged sidecar is replaced
  }
}

void count(const Sidecar& sidecar, AddSidecarReport& report) {
  report.files = sidecar.files.size();
  for (const auto& [name, facts] : sidecar.files) report.bytes += facts.size_bytes;
}

}  // namespace

AddSidecarReport add_sidecar(const fs::path& checkpoint, const AddSidecarOptions& options) {
  AddSidecarReport report;
  report.sidecar = sidecar_path(checkpoint);
  const std::optional<fs::path> directory = checkpoint_directory(checkpoint);
  const std::shared_ptr<Storage> storage = directory ? file_system_storage(*directory) : nullptr;
  const SaveTurn turn = storage ? begin_save(*storage) : SaveTurn();
  VerifyOptions verify_options;
  verify_options.jobs = options.jobs;
  verify_options.progress = options.progress;
  verify_options.cancellation = options.cancellation;
  report.verified = verify(checkpoint, verify_options);
  std::error_code ignored;
  const bool had_sidecar = fs::exists(report.sidecar, ignored);
  if (report.verified.good() && report.verified.has_sidecar) {
    if (const auto sidecar = read_sidecar(checkpoint)) count(*sidecar, report);
    return report;
  }
  if (!report.verified.good() && !options.force) return report;
  OpenOptions open_options;
  open_options.check_checksums = false;
  const auto opened = Checkpoint::open(checkpoint, open_options);
  Summing summing(checkpoint, options);
  Sidecar sidecar = summing.run(names_of_files(*opened));
  if (index_kind(checkpoint.filename().string())) keep_facts_of_others(checkpoint, sidecar);
  if (storage) {
    replace_sidecar(*storage, turn, summing, sidecar);
  } else {
    summing.require_unchanged();
    replace_file(report.sidecar, write_file_sidecar(sidecar));
  }
  report.written = true;
  report.replaced = had_sidecar;
  count(sidecar, report);
  return report;
}

}  // namespace tessera::checkpoint
