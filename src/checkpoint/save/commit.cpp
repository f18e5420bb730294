#include "checkpoint/save/commit.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "tessera/base/crc32.h"
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

// Removes the uncommitted metadata of saves that began before one of `generation`: their renames fail from then on.
void remove_uncommitted_metadata(Storage& storage, const std::vector<std::string>& names, std::int64_t generation) {
  for (const std::string& name : names) {
    const auto parsed = parse_uncommitted_name(name);
    if (parsed && parsed->name == kMetadataFileName && parsed->generation < generation) storage.remove(name);
  }
}

// Returns whether a sidecar is that of the present metadata. Returns true if there is no metadata.
bool may_describe_metadata(const Storage& storage, ByteView sidecar) {
  const std::string name(kMetadataFileName);
  const std::optional<Bytes> metadata = read_if_present(storage, name);
  if (!metadata) return true;
  try {
    const Sidecar parsed = parse_sidecar(sidecar, storage.name_of(std::string(kSidecarFileName)));
    const auto facts = parsed.files.find(name);
    return facts != parsed.files.end() && facts->second.size_bytes == metadata->size() &&
           facts->second.crc32 == crc32(*metadata);
  } catch (const Error&) {
    return false;  // it is not complete
  }
}

// Renames the temporary sidecar, which had `contents`, to the sidecar. If it renamed that of another commit instead,
// renames it back and returns false. A sidecar that differs may also have been committed after this one.
bool rename_to_sidecar(Storage& storage, const std::optional<Bytes>& contents) {
  const std::string sidecar(kSidecarFileName);
  storage.rename(temporary_sidecar(), sidecar);
  const std::optional<Bytes> found = read_if_present(storage, sidecar);
  if (!found || found == contents || may_describe_metadata(storage, *found)) return true;
  if (!storage.size_bytes(temporary_sidecar())) storage.rename(sidecar, temporary_sidecar());
  return false;
}

// Completes the commit of a killed save if it had replaced `.metadata`, whose sidecar then has the temporary name, or
// removes the temporary sidecar. If the save was slow instead, it must not rename `.metadata` after this has looked at
// it. Leaves the temporary sidecar if it is that of yet another save.
void finish_killed_commit(Storage& storage, const SaveTurn& turn) {
  remove_uncommitted_metadata(storage, storage.list(), turn.generation);
  if (read_interrupted_sidecar(storage)) {
    if (rename_to_sidecar(storage, turn.left_sidecar)) storage.sync();
    return;
  }
  const std::string own = name_to_remove(turn);
  const auto is_left = [&] { return read_if_present(storage, own) == turn.left_sidecar; };
  if (rename_if(storage, temporary_sidecar(), own, is_left)) storage.remove(own);
}

// Returns the largest generation of the data files that a sidecar names, or -1. Searches the text, since the sidecar
// may be damaged, and has 8 bytes for each 128 KiB of data: the name of a data file occurs in it as it is, in quotes.
std::int64_t largest_generation(std::string_view sidecar) {
  constexpr std::string_view kBegin = "\"__";
  std::int64_t largest = -1;
  for (std::size_t at = sidecar.find(kBegin); at != std::string_view::npos; at = sidecar.find(kBegin, at + 1)) {
    const std::string_view rest = sidecar.substr(at + 1);
    if (const auto data = parse_data_file_name(rest.substr(0, rest.find('"')))) {
      largest = std::max(largest, data->generation);
    }
  }
  return largest;
}

// Replaces `.metadata` and the sidecar.
//
// Law: at every instant, whatever part of the renames since the last sync survives a crash, a reader finds the sidecar
// that belongs to `.metadata`, or none if it has none: as the sidecar, or under the temporary name, which precedes it.
class Commit {
 public:
  Commit(Storage& storage, const SaveTurn& turn, const CommitConditions& conditions)
      : storage_(storage),
        turn_(turn),
        conditions_(conditions),
        lock_(storage),
        metadata_temporary_(to_string(UncommittedName{metadata_name_, turn.generation})) {}

  void run(const WriteMetadata& write_metadata, Sidecar sidecar) {
    try {
      // It precedes the lock, so that a save that finds the lock when it begins has a later generation.
      metadata_ = sidecar.files[metadata_name_] = write_temporary(write_metadata);
      sidecar_ = write_sidecar(sidecar);
      const std::vector<std::string> names = lock_.take(turn_, sidecar_);
      old_metadata_ = read_if_present(storage_, metadata_name_);
      old_sidecar_ = read_if_present(storage_, sidecar_name_);
      check(names);
      storage_.sync();
      lock_.require_held();
      metadata_may_be_new_ = true;
      storage_.rename(metadata_temporary_, metadata_name_);
      storage_.sync();
      lock_.require_held();
      sidecar_may_be_new_ = true;
      lock_.become_sidecar();
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
    has_temporary_ = true;
    FileSums sums;
    write_metadata([&](ByteView bytes) {
      file->write_at(sums.size_bytes(), bytes);
      file->start_writeback(sums.size_bytes(), bytes.size());
      sums.add(bytes);
    });
    file->finish();
    return sums.facts();
  }

  // Throws Error(invalid_argument) if another save was committed that this one must not replace.
  void check(const std::vector<std::string>& names) const {
    if (!conditions_.overwrite && old_metadata_) {
      fail(ErrorCode::invalid_argument, "commit to {}: found a checkpoint, expected none, because overwrite is false",
           storage_.name());
    }
    if (old_sidecar_ && largest_generation(as_text(*old_sidecar_)) > turn_.generation) {
      fail(ErrorCode::invalid_argument,
           "commit to {}: found a checkpoint of a save that began later, expected none: save to a directory one at a "
           "time",
           storage_.name());
    }
    // That of a later save without data files shows only in what the later save removed.
    require_present(storage_, names, conditions_.own_files);
    require_present(storage_, names, {metadata_temporary_});
  }

  void undo(ErrorCode code, std::string_view what) {
    std::string second;
    bool is_overtaken = false;
    try {
      // A rename that failed without an effect left its temporary file.
      if (metadata_may_be_new_ && !storage_.size_bytes(metadata_temporary_)) is_overtaken = !restore();
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
      if (old_sidecar_is_temporary_ && lock_.is_held()) {
        lock_.become_sidecar();
      } else {
        lock_.release();
      }
      if (has_temporary_) storage_.remove(metadata_temporary_);
      storage_.sync();
    } catch (...) {
      // `what` explains more.
    }
    if (!is_overtaken) return;
    throw OutcomeUnknown(
        ErrorCode::invalid_argument,
        fmt::format("{}; another save to {} took over, and no file of it was changed", what, storage_.name()));
  }

  // Restores the old files. Returns false if another save took over: the files are its own.
  bool restore() {
    storage_.sync();  // a temporary file that is made now must not replace one whose rename is then lost
    const bool was_released = sidecar_may_be_new_ && !storage_.size_bytes(temporary_sidecar());
    // The old sidecar must be under the temporary name before the old metadata is back.
    if (was_released) lock_.create(old_sidecar_.value_or(sidecar_));
    const std::optional<Bytes> present = read_if_present(storage_, metadata_name_);
    if (!lock_.is_held() || !present || facts_of(*present) != metadata_) return false;
    storage_.sync();
    const auto is_held = [this] { return lock_.is_held(); };
    if (was_released && !old_sidecar_) {
      if (!rename_if(storage_, sidecar_name_, name_to_remove(turn_), is_held)) return false;
      storage_.remove(name_to_remove(turn_));
    }
    if (old_metadata_) {
      write_new_file(storage_, metadata_temporary_, *old_metadata_);
      storage_.sync();
      if (!lock_.is_held()) return false;
      storage_.rename(metadata_temporary_, metadata_name_);
    } else if (!rename_if(storage_, metadata_name_, metadata_temporary_, is_held)) {
      return false;
    }
    storage_.sync();
    old_sidecar_is_temporary_ = was_released && old_sidecar_;
    return true;
  }

  Storage& storage_;
  const SaveTurn& turn_;
  const CommitConditions& conditions_;
  CommitLock lock_;
  const std::string metadata_name_{kMetadataFileName}, sidecar_name_{kSidecarFileName};
  const std::string metadata_temporary_;
  Sidecar::FileFacts metadata_;  // of the new one
  Bytes sidecar_;                // the new one
  std::optional<Bytes> old_metadata_, old_sidecar_;
  bool metadata_may_be_new_ = false, sidecar_may_be_new_ = false;
  bool has_temporary_ = false;  // whether this save created `metadata_temporary_`
  bool old_sidecar_is_temporary_ = false;
};

}  // namespace

SaveTurn begin_save(const Storage& storage) {
  SaveTurn turn;
  const auto add = [&](std::int64_t found) {
    constexpr std::int64_t kLast = std::numeric_limits<std::int64_t>::max();
    turn.generation = std::max(turn.generation, std::min(found, kLast - 1) + 1);
  };
  for (const std::string& name : storage.list()) {
    if (const auto data = parse_data_file_name(name)) add(data->generation);
    if (const auto uncommitted = parse_uncommitted_name(name)) add(uncommitted->generation);
    if (name != kTemporarySidecarName && name != kSidecarFileName) continue;
    std::optional<Bytes> sidecar = read_if_present(storage, name);
    if (sidecar) add(largest_generation(as_text(*sidecar)));
    if (name == kTemporarySidecarName) turn.left_sidecar = std::move(sidecar);
  }
  return turn;
}

std::vector<std::string> CommitLock::take(const SaveTurn& turn, Bytes contents) {
  if (turn.left_sidecar && read_if_present(storage_, temporary_sidecar()) == turn.left_sidecar)
    finish_killed_commit(storage_, turn);
  if (storage_.size_bytes(temporary_sidecar())) {
    fail(ErrorCode::invalid_argument,
         "commit to {}: found {}, expected none: another save is being committed; save to a directory one at a time",
         storage_.name(), kTemporarySidecarName);
  }
  create(std::move(contents));
  std::vector<std::string> names = storage_.list();
  remove_uncommitted_metadata(storage_, names, turn.generation);
  return names;
}

void CommitLock::create(Bytes contents) {
  const std::unique_ptr<OutputFile> file = storage_.create(temporary_sidecar(), 0);  // it must not begin with zeros
  contents_ = std::move(contents);
  is_written_ = false;
  file->write_at(0, *contents_);
  is_written_ = true;
  file->finish();
}

bool CommitLock::is_held() const { return contents_ && read_if_present(storage_, temporary_sidecar()) == contents_; }

void CommitLock::require_held() const {
  if (!is_held()) fail_as_overtaken();
}

void CommitLock::become_sidecar() {
  if (!rename_to_sidecar(storage_, contents_)) fail_as_overtaken();
  contents_.reset();
}

void CommitLock::fail_as_overtaken() const {
  fail(ErrorCode::invalid_argument,
       "commit to {}: {} is no longer that of this save, expected it until the save ends: another save took over; save "
       "to a directory one at a time",
       storage_.name(), kTemporarySidecarName);
}

void CommitLock::release() noexcept {
  try {
    if (!contents_) return;
    const std::optional<Bytes> found = read_if_present(storage_, temporary_sidecar());
    const bool is_begun = found && !is_written_ && as_text(*contents_).starts_with(as_text(*found));
    if (is_begun || found == contents_) storage_.remove(temporary_sidecar());
  } catch (...) {
    // The caller reports an error of its own.
  }
}

std::string name_to_remove(const SaveTurn& turn) {
  return to_string(UncommittedName{"shard-removed.safetensors", turn.generation});
}

bool rename_if(Storage& storage, const std::string& name, const std::string& own,
               const std::function<bool()>& is_mine) {
  storage.rename(name, own);
  const auto put_back = [&] {
    // If the other save began after the rename, it has removed this file.
    if (storage.size_bytes(own)) storage.rename(own, name);
  };
  try {
    if (is_mine()) return true;
  } catch (...) {
    put_back();
    throw;
  }
  put_back();
  return false;
}

void require_present(const Storage& storage, const std::vector<std::string>& names,
                     const std::vector<std::string>& own) {
  for (const std::string& name : own) {
    if (std::ranges::binary_search(names, name)) continue;
    fail(ErrorCode::invalid_argument,
         "commit to {}: '{}' is no longer there, expected the file that this save wrote: save to a directory one at a "
         "time",
         storage.name(), printable(name));
  }
}

void commit(Storage& storage, const SaveTurn& turn, const CommitConditions& conditions,
            const WriteMetadata& write_metadata, Sidecar sidecar) {
  Commit(storage, turn, conditions).run(write_metadata, std::move(sidecar));
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
