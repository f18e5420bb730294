#include "checkpoint/save/commit.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/checkpoint/internal/file_names.h"

namespace tessera::checkpoint {
namespace {

std::string temporary_name(std::string_view name) { return std::string(name) + std::string(kTemporarySuffix); }

// Replaces `.metadata` and the sidecar.
//
// Law: at every instant, whatever part of the renames since the last sync survives a crash, a reader finds the sidecar
// that belongs to `.metadata`, or none if it has none: as the sidecar, or under the temporary name, which precedes it.
class Commit {
 public:
  explicit Commit(Storage& storage) : storage_(storage) {
    finish_interrupted();
    storage_.remove(sidecar_temporary_);
    storage_.remove(metadata_temporary_);
    old_metadata_ = contents_of(metadata_name_);
    old_sidecar_ = contents_of(sidecar_name_);
  }

  void run(const WriteMetadata& write_metadata, Sidecar sidecar) {
    try {
      sidecar.files[metadata_name_] = write_temporary(write_metadata);
      write_new_file(storage_, sidecar_temporary_, write_sidecar(sidecar));
      storage_.sync();
      metadata_may_be_new_ = true;
      storage_.rename(metadata_temporary_, metadata_name_);
      storage_.sync();
      sidecar_may_be_new_ = true;
      storage_.rename(sidecar_temporary_, sidecar_name_);
      storage_.sync();
    } catch (const Error& error) {
      undo(error);
      throw;
    }
  }

 private:
  // A save that was killed between its two renames left the sidecar of `.metadata` under the temporary name.
  void finish_interrupted() {
    if (!read_interrupted_sidecar(storage_)) return;
    storage_.rename(sidecar_temporary_, sidecar_name_);
    storage_.sync();
  }

  Sidecar::FileFacts write_temporary(const WriteMetadata& write_metadata) {
    const std::unique_ptr<OutputFile> file = storage_.create(metadata_temporary_, 0);  // its size is not known yet
    FileSums sums;
    write_metadata([&](ByteView bytes) {
      file->write_at(sums.size_bytes(), bytes);
      file->start_writeback(sums.size_bytes(), bytes.size());
      sums.add(bytes);
    });
    file->finish();
    return sums.facts();
  }

  std::optional<Bytes> contents_of(const std::string& name) const {
    if (!storage_.size_bytes(name)) return std::nullopt;
    return read_file(storage_, name);
  }

  void undo(const Error& error) {
    try {
      // A rename that failed without an effect left its temporary file.
      if (metadata_may_be_new_ && !storage_.size_bytes(metadata_temporary_)) {
        storage_.sync();  // a temporary file that is made now must not replace one whose rename is then lost
        if (sidecar_may_be_new_ && !storage_.size_bytes(sidecar_temporary_)) prepare_old_sidecar();
        restore_metadata();
      }
    } catch (const Error& second) {
      throw OutcomeUnknown(error.code(),
                           fmt::format("{}; restoring the old checkpoint failed too: {}; the old checkpoint or the new "
                                       "one is there, and no file of either was removed",
                                       error.what(), second.what()));
    }
    // From here on, failures leave files that the next save removes or completes.
    try {
      if (old_sidecar_is_temporary_) {
        storage_.rename(sidecar_temporary_, sidecar_name_);
      } else {
        storage_.remove(sidecar_temporary_);
      }
      storage_.remove(metadata_temporary_);
      storage_.sync();
    } catch (const Error&) {
      // `error` explains more.
    }
  }

  void prepare_old_sidecar() {
    if (old_sidecar_) {
      write_new_file(storage_, sidecar_temporary_, *old_sidecar_);
      old_sidecar_is_temporary_ = true;
    } else {
      storage_.remove(sidecar_name_);
    }
    storage_.sync();
  }

  void restore_metadata() {
    if (old_metadata_) {
      write_new_file(storage_, metadata_temporary_, *old_metadata_);
      storage_.sync();
      storage_.rename(metadata_temporary_, metadata_name_);
    } else {
      storage_.remove(metadata_name_);
    }
    storage_.sync();
  }

  Storage& storage_;
  const std::string metadata_name_{kMetadataFileName}, metadata_temporary_ = temporary_name(kMetadataFileName);
  const std::string sidecar_name_{kSidecarFileName}, sidecar_temporary_ = temporary_name(kSidecarFileName);
  std::optional<Bytes> old_metadata_, old_sidecar_;
  bool metadata_may_be_new_ = false, sidecar_may_be_new_ = false, old_sidecar_is_temporary_ = false;
};

}  // namespace

std::int64_t next_generation(const Storage& storage) {
  std::int64_t next = 0;
  for (const std::string& name : storage.list()) {
    if (const auto data = parse_data_file_name(name)) next = std::max(next, data->generation + 1);
  }
  return next;
}

void commit(Storage& storage, const WriteMetadata& write_metadata, Sidecar sidecar) {
  Commit(storage).run(write_metadata, std::move(sidecar));
}

std::vector<std::string> remove_unreferenced(Storage& storage, const std::set<std::string>& referenced) {
  std::vector<std::string> not_removed;
  try {
    for (const std::string& name : storage.list()) {
      const bool is_removable = may_be_left_by_a_save(name) || parse_rank_metadata_name(name);
      if (!is_removable || referenced.contains(name)) continue;
      try {
        storage.remove(name);
      } catch (const Error& error) {
        not_removed.push_back(error.what());
      }
    }
  } catch (const Error& error) {
    not_removed.push_back(error.what());
  }
  return not_removed;
}

}  // namespace tessera::checkpoint
