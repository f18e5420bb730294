#include "checkpoint/save/commit.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/checkpoint/internal/file_names.h"

namespace tessera::checkpoint {
namespace {

constexpr std::string_view kUnknownException = "an exception of unknown type";
const std::string& temporary_sidecar() {
  static const std::string name(kTemporarySidecarName);
  return name;
}

std::optional<Bytes> read_if_present(const Storage& storage, const std::string& name) {
  try {
    return read_file(storage, name);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_found) throw;
    return std::nullopt;
  }
}

// A save that was killed between its two renames left the sidecar of `.metadata` under the temporary name.
void finish_killed_commit(Storage& storage) {
  if (!read_interrupted_sidecar(storage)) return storage.remove(temporary_sidecar());
  storage.rename(temporary_sidecar(), std::string(kSidecarFileName));
  storage.sync();
}

// Throws Error(invalid_argument) if a save that began later was committed. Does not look for the files of this one:
// ranks may write to disks of their own.
void check_is_latest(const Storage& storage, std::int64_t generation) {
  const std::vector<std::string> names = storage.list();
  const auto is_later = [&](const std::string& name) {
    const auto data = parse_data_file_name(name);
    return data && data->generation > generation;
  };
  bool is_overtaken = false;
  if (std::ranges::any_of(names, is_later)) {
    const std::optional<Sidecar> committed = read_sidecar(storage);
    is_overtaken = committed && std::ranges::any_of(committed->files, [&](const auto& f) { return is_later(f.first); });
  }
  if (is_overtaken) {
    fail(
        ErrorCode::invalid_argument,
        "commit to {}: found a checkpoint of a save that began later, expected none: save to a directory one at a time",
        storage.name());
  }
}

// Replaces `.metadata` and the sidecar.
//
// Law: at every instant, whatever part of the renames since the last sync survives a crash, a reader finds the sidecar
// that belongs to `.metadata`, or none if it has none: as the sidecar, or under the temporary name, which precedes it.
class Commit {
 public:
  Commit(Storage& storage, const SaveTurn& turn)
      : storage_(storage),
        turn_(turn),
        metadata_temporary_(to_string(UncommittedName{metadata_name_, turn.generation})) {}

  void run(const WriteMetadata& write_metadata, Sidecar sidecar) {
    std::unique_ptr<OutputFile> sidecar_file = begin_commit(storage_, turn_);
    has_sidecar_temporary_ = true;
    try {
      check_is_latest(storage_, turn_.generation);
      old_metadata_ = read_if_present(storage_, metadata_name_);
      old_sidecar_ = read_if_present(storage_, sidecar_name_);
      sidecar.files[metadata_name_] = write_temporary(write_metadata);
      sidecar_file->write_at(0, write_sidecar(sidecar));
      sidecar_file->finish();
      storage_.sync();
      metadata_may_be_new_ = true;
      storage_.rename(metadata_temporary_, metadata_name_);
      storage_.sync();
      sidecar_may_be_new_ = true;
      storage_.rename(temporary_sidecar(), sidecar_name_);
      storage_.sync();
    } catch (const std::exception& error) {
      const auto* known = dynamic_cast<const Error*>(&error);
      undo(known != nullptr ? known->code() : ErrorCode::internal, error.what());
      throw;
    } catch (...) {
      undo(ErrorCode::internal, kUnknownException);
      throw;
    }
  }

 private:
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

  void undo(ErrorCode code, std::string_view what) {
    std::string second;
    try {
      // A rename that failed without an effect left its temporary file.
      if (metadata_may_be_new_ && !storage_.size_bytes(metadata_temporary_)) {
        storage_.sync();  // a temporary file that is made now must not replace one whose rename is then lost
        if (sidecar_may_be_new_ && !storage_.size_bytes(temporary_sidecar())) prepare_old_sidecar();
        restore_metadata();
      }
    } catch (const std::exception& error) {
      second = error.what();
    } catch (...) {
      second = kUnknownException;
    }
    if (!second.empty()) {
      throw OutcomeUnknown(code,
                           fmt::format("{}; restoring the old checkpoint failed too: {}; the old checkpoint or the "
                                       "new one is there, and no file of either was removed",
                                       what, second));
    }
    // From here on, failures leave files that the next save removes or completes.
    try {
      if (old_sidecar_is_temporary_) {
        storage_.rename(temporary_sidecar(), sidecar_name_);
      } else if (has_sidecar_temporary_) {
        storage_.remove(temporary_sidecar());
      }
      storage_.remove(metadata_temporary_);
      storage_.sync();
    } catch (...) {
      // `what` explains more.
    }
  }

  void prepare_old_sidecar() {
    has_sidecar_temporary_ = false;
    if (old_sidecar_) {
      write_new_file(storage_, temporary_sidecar(), *old_sidecar_);
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
  const SaveTurn& turn_;
  const std::string metadata_name_{kMetadataFileName}, sidecar_name_{kSidecarFileName};
  const std::string metadata_temporary_;
  std::optional<Bytes> old_metadata_, old_sidecar_;
  bool metadata_may_be_new_ = false, sidecar_may_be_new_ = false;
  bool has_sidecar_temporary_ = false, old_sidecar_is_temporary_ = false;
};

}  // namespace

SaveTurn begin_save(const Storage& storage) {
  SaveTurn turn;
  for (const std::string& name : storage.list()) {
    std::optional<std::int64_t> found;
    if (const auto data = parse_data_file_name(name)) found = data->generation;
    if (const auto uncommitted = parse_uncommitted_name(name)) found = uncommitted->generation;
    if (found) turn.generation = std::max(turn.generation, *found + 1);
    if (name == kTemporarySidecarName) turn.left_sidecar = read_if_present(storage, name);
  }
  return turn;
}

std::unique_ptr<OutputFile> begin_commit(Storage& storage, const SaveTurn& turn) {
  if (turn.left_sidecar && read_if_present(storage, temporary_sidecar()) == turn.left_sidecar)
    finish_killed_commit(storage);
  if (storage.size_bytes(temporary_sidecar())) {
    fail(ErrorCode::invalid_argument,
         "commit to {}: found {}, expected none: another save is being committed; save to a directory one at a time",
         storage.name(), kTemporarySidecarName);
  }
  return storage.create(temporary_sidecar(), 0);  // its size is not known yet
}

void commit(Storage& storage, const SaveTurn& turn, const WriteMetadata& write_metadata, Sidecar sidecar) {
  Commit(storage, turn).run(write_metadata, std::move(sidecar));
}

std::vector<std::string> remove_unreferenced(Storage& storage, const std::set<std::string>& referenced,
                                             std::int64_t generation) {
  std::vector<std::string> not_removed;
  const auto attempt = [&](const auto& f) {
    try {
      f();
    } catch (const std::exception& error) {
      not_removed.emplace_back(error.what());
    } catch (...) {
      not_removed.emplace_back(kUnknownException);
    }
  };
  const auto is_removable = [&](const std::string& name) {
    if (const auto data = parse_data_file_name(name)) return data->generation < generation;
    if (const auto uncommitted = parse_uncommitted_name(name)) return uncommitted->generation < generation;
    return parse_rank_metadata_name(name).has_value();
  };
  attempt([&] {
    for (const std::string& name : storage.list()) {
      if (is_removable(name) && !referenced.contains(name)) attempt([&] { storage.remove(name); });
    }
  });
  return not_removed;
}

}  // namespace tessera::checkpoint
