#include "checkpoint/save/commit.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/checkpoint/internal/file_names.h"

namespace tessera::checkpoint {
namespace {

constexpr std::string_view kUnknownException = "an exception of unknown type";
// What name_to_remove() begins with.
constexpr std::string_view kRemovedName = "shard-removed.safetensors";

const std::string& temporary_sidecar() {
  static const std::string name(kTemporarySidecarName);
  return name;
}
const std::string& final_sidecar() {
  static const std::string name(kSidecarFileName);
  return name;
}

std::optional<Bytes> read_if_present(const Storage& storage, const std::string& name,
                                     std::uint64_t limit_bytes = UINT64_MAX) {
  try {
    return read_file(storage, name, limit_bytes);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_found) throw;
    return std::nullopt;
  }
}

std::optional<Bytes> read_temporary_sidecar(const Storage& storage) {
  return read_if_present(storage, temporary_sidecar(), kMaxSidecarBytes);
}

// Returns nothing for a sidecar that readers refuse for its size: it need not be restored.
std::optional<Bytes> read_final_sidecar(const Storage& storage) {
  const std::optional<std::uint64_t> size = storage.size_bytes(final_sidecar());
  if (!size || *size > kMaxSidecarBytes) return std::nullopt;
  return read_if_present(storage, final_sidecar(), kMaxSidecarBytes);
}

// Returns the generation of the sidecar. Reads its beginning alone: the rest has 8 bytes for each 128 KiB of data.
std::optional<std::int64_t> final_sidecar_generation(const Storage& storage) {
  try {
    const std::shared_ptr<const ByteSource> file = storage.open(final_sidecar());
    Bytes begin(std::min<std::uint64_t>(file->size_bytes(), 1024));
    file->read_at(0, begin);
    return sidecar_generation(begin);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_found) throw;
    return std::nullopt;
  }
}

// Returns nothing for the contents of a sidecar that are not complete.
std::optional<Sidecar> parse_if_complete(const Storage& storage, ByteView contents) {
  try {
    return parse_sidecar(contents, storage.name_of(temporary_sidecar()));
  } catch (const Error&) {
    return std::nullopt;
  }
}

// Returns whether a sidecar may be that of the present checkpoint: it describes `.metadata` or, of shards, one is
// there.
bool may_be_committed(const Storage& storage, const std::optional<Sidecar>& sidecar) {
  if (!sidecar) return false;
  if (sidecar->files.contains(std::string(kMetadataFileName))) return describes_metadata(storage, *sidecar);
  const std::vector<std::string> names = storage.list();
  return std::any_of(names.begin(), names.end(), [&](const auto& name) { return sidecar->files.contains(name); });
}

// Removes the uncommitted metadata of saves that began before one of `generation`, whose renames fail from then on, and
// what they moved aside.
void remove_uncommitted_metadata(Storage& storage, const std::vector<std::string>& names, std::int64_t generation) {
  for (const std::string& name : names) {
    const auto parsed = parse_uncommitted_name(name);
    if (!parsed || parsed->generation >= generation) continue;
    if (parsed->name == kMetadataFileName || parsed->name == kRemovedName) storage.remove(name);
  }
}

// Renames `own` back to `name`, unless there is a newer file of that name, or another save has removed `own`.
void put_back(Storage& storage, const std::string& own, const std::string& name) {
  try {
    if (!storage.rename_new(own, name)) storage.remove(own);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_found) throw;
  }
}

// Renames the temporary sidecar, which had `contents`, to the sidecar. Returns true as well if another save did so for
// this one. If it renamed that of another commit instead, puts both sidecars back and returns false. A sidecar that
// differs may also have been committed after this one, and an equal one may be that of an undo of another save, which
// has not restored the `.metadata` that is listed in `sidecar`.
bool rename_to_sidecar(Storage& storage, const std::string& own, const std::optional<Bytes>& contents,
                       const Sidecar& sidecar) {
  const std::optional<Bytes> before = read_final_sidecar(storage);
  if (!rename_if_present(storage, temporary_sidecar(), final_sidecar())) return read_final_sidecar(storage) == contents;
  const std::optional<Bytes> found = read_final_sidecar(storage);
  if (!found) return true;
  if (found != contents) {
    if (may_be_committed(storage, parse_if_complete(storage, *found))) return true;
  } else {
    // An undo that moved `.metadata` aside puts it back.
    const std::string metadata(kMetadataFileName);
    const bool is_compared = sidecar.files.contains(metadata) && storage.size_bytes(metadata);
    if (!is_compared || describes_metadata(storage, sidecar)) return true;
  }
  const auto is_found = [&] { return read_if_present(storage, own, kMaxSidecarBytes) == found; };
  if (rename_if(storage, final_sidecar(), own, is_found)) put_back(storage, own, temporary_sidecar());
  if (before && may_be_committed(storage, parse_if_complete(storage, *before))) {
    write_new_file(storage, own, *before);
    put_back(storage, own, final_sidecar());
  }
  return false;
}

// Completes a commit that was killed after it had replaced `.metadata`, whose sidecar then has the temporary name, or
// removes the temporary sidecar, which had `contents`. If the commit was slow instead, it may have completed or undone
// itself. Leaves the temporary sidecar if it is that of yet another save.
void finish_killed_commit(Storage& storage, const std::string& own, const std::optional<Bytes>& contents) {
  if (const std::optional<Sidecar> sidecar = read_interrupted_sidecar(storage)) {
    if (rename_to_sidecar(storage, own, contents, *sidecar)) storage.sync();
    return;
  }
  const auto is_left = [&] { return read_if_present(storage, own, kMaxSidecarBytes) == contents; };
  if (rename_if(storage, temporary_sidecar(), own, is_left)) storage.remove(own);
}

// If the sidecar is not that of `.metadata`, replaces it by the one of `candidates` that is.
void restore_sidecar(Storage& storage, const std::string& own, const std::vector<std::optional<Bytes>>& candidates) {
  const auto is_right = [&](const std::optional<Bytes>& contents) {
    const std::optional<Sidecar> sidecar = contents ? parse_if_complete(storage, *contents) : std::nullopt;
    return sidecar && describes_metadata(storage, *sidecar);
  };
  if (is_right(read_final_sidecar(storage))) return;
  const auto found = std::find_if(candidates.begin(), candidates.end(), is_right);
  if (found == candidates.end()) return;
  write_new_file(storage, own, **found);
  rename_if_present(storage, own, final_sidecar());
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
        lock_(storage, turn),
        metadata_temporary_(to_string(UncommittedName{metadata_name_, turn.generation})) {}

  void run(WriteMetadata write_metadata, Sidecar sidecar) {
    try {
      // It precedes the lock, so that a save that finds the lock when it begins has a later generation.
      metadata_ = sidecar.files[metadata_name_] = write_temporary(write_metadata);
      sidecar_ = write_sidecar(sidecar, turn_.generation);
      const std::vector<std::string> names = lock_.take(sidecar_);
      old_metadata_ = read_if_present(storage_, metadata_name_);
      old_sidecar_ = read_final_sidecar(storage_);
      check(names);
      storage_.sync();
      lock_.require_held();
      metadata_may_be_new_ = true;
      storage_.rename(metadata_temporary_, metadata_name_);
      storage_.sync();
      lock_.require_held();
      sidecar_may_be_new_ = true;
      lock_.become_sidecar(sidecar);
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
  Sidecar::FileFacts write_temporary(WriteMetadata write_metadata) {
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
    if (old_sidecar_ && sidecar_generation(*old_sidecar_) > turn_.generation) {
      fail(ErrorCode::invalid_argument,
           "commit to {}: found a checkpoint of a save that began later, expected none: save to a directory one at a "
           "time",
           storage_.name());
    }
    // A program that keeps no generation may have removed them.
    require_present(storage_, names, conditions_.own_files);
    require_present(storage_, names, {metadata_temporary_});
  }

  void undo(ErrorCode code, std::string_view what) {
    std::string second;
    bool is_overtaken = false;
    try {
      // A rename that failed without an effect left its temporary file.
      if (metadata_may_be_new_ && !storage_.size_bytes(metadata_temporary_)) {
        is_overtaken = lock_.is_overtaken() || !restore();
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
      if (old_sidecar_is_temporary_ && lock_.is_held()) {
        Sidecar sidecar;
        if (old_metadata_) sidecar.files[metadata_name_] = facts_of(*old_metadata_);
        lock_.become_sidecar(sidecar);
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
      if (!rename_if(storage_, final_sidecar(), name_to_remove(turn_), is_held)) return false;
      storage_.remove(name_to_remove(turn_));
    }
    if (old_metadata_) {
      write_new_file(storage_, metadata_temporary_, *old_metadata_);
      storage_.sync();
      if (!lock_.is_held() || !rename_if_present(storage_, metadata_temporary_, metadata_name_)) return false;
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
  const std::string metadata_name_{kMetadataFileName};
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
  }
  turn.left_sidecar = read_temporary_sidecar(storage);
  if (turn.left_sidecar) add(sidecar_generation(*turn.left_sidecar).value_or(-1));
  add(final_sidecar_generation(storage).value_or(-1));
  return turn;
}

std::vector<std::string> CommitLock::take(Bytes contents) {
  const std::string own = name_to_remove(turn_);
  const std::optional<Bytes> left = read_temporary_sidecar(storage_);
  // `tessera sum` gives way at any time: it has no generation, and describes the checkpoint that is there. An undo
  // whose old sidecar has none describes it when only its last rename is missing.
  const bool takes_over =
      left && (left == turn_.left_sidecar ||
               (!sidecar_generation(*left) && may_be_committed(storage_, parse_if_complete(storage_, *left))));
  std::optional<Bytes> before;
  if (takes_over) {
    // A slow commit must not replace `.metadata` while this looks at it.
    remove_uncommitted_metadata(storage_, storage_.list(), turn_.generation);
    before = read_final_sidecar(storage_);
    finish_killed_commit(storage_, own, left);
  }
  require_none("save to a directory one at a time");
  create(std::move(contents));
  std::vector<std::string> names = storage_.list();
  remove_uncommitted_metadata(storage_, names, turn_.generation);
  // Until here, the undo of a slow commit may have restored the old `.metadata` after this looked at it.
  if (takes_over) restore_sidecar(storage_, own, {left, before});
  return names;
}

void CommitLock::take_between_saves(Bytes contents) {
  const std::optional<Bytes> left = read_temporary_sidecar(storage_);
  if (left && left == turn_.left_sidecar && !sidecar_generation(*left)) {
    const std::optional<Sidecar> sidecar = parse_if_complete(storage_, *left);
    if (!sidecar || may_be_committed(storage_, sidecar)) finish_killed_commit(storage_, name_to_remove(turn_), left);
  }
  require_none("if it was killed, the next save removes the file");
  create(std::move(contents));
}

void CommitLock::require_none(std::string_view advice) const {
  if (!storage_.size_bytes(temporary_sidecar())) return;
  fail(ErrorCode::invalid_argument, "commit to {}: found {}, expected none: another save is being committed; {}",
       storage_.name(), kTemporarySidecarName, advice);
}

void CommitLock::create(Bytes contents) {
  const std::unique_ptr<OutputFile> file = storage_.create(temporary_sidecar(), 0);  // it must not begin with zeros
  contents_ = std::move(contents);
  is_written_ = false;
  file->write_at(0, *contents_);
  is_written_ = true;
  file->finish();
}

bool CommitLock::is_held() const { return contents_ && read_temporary_sidecar(storage_) == contents_; }

void CommitLock::require_held() {
  if (!is_held()) fail_as_overtaken();
}

void CommitLock::become_sidecar(const Sidecar& sidecar) {
  if (!rename_to_sidecar(storage_, name_to_remove(turn_), contents_, sidecar)) fail_as_overtaken();
  contents_.reset();
}

void CommitLock::fail_as_overtaken() {
  is_overtaken_ = true;
  fail(ErrorCode::invalid_argument,
       "commit to {}: {} is no longer that of this save, expected it until the save ends: another save took over; save "
       "to a directory one at a time",
       storage_.name(), kTemporarySidecarName);
}

void CommitLock::release() noexcept {
  try {
    if (!contents_ || is_overtaken_) return;
    const auto is_own = [&](const std::string& name) {
      const std::optional<Bytes> found = read_if_present(storage_, name, kMaxSidecarBytes);
      const bool is_begun = found && !is_written_ && as_text(*contents_).starts_with(as_text(*found));
      return is_begun || found == contents_;
    };
    if (!is_own(temporary_sidecar())) return;
    const std::string own = name_to_remove(turn_);
    try {
      if (rename_if(storage_, temporary_sidecar(), own, [&] { return is_own(own); })) storage_.remove(own);
    } catch (const Error&) {
      // Renaming fails. If another save takes over right now, that one fails too, and nothing else is lost.
      if (is_own(temporary_sidecar())) storage_.remove(temporary_sidecar());
    }
  } catch (...) {
    // The caller reports an error of its own.
  }
}

std::string name_to_remove(const SaveTurn& turn) {
  return to_string(UncommittedName{std::string(kRemovedName), turn.generation});
}

bool rename_if_present(Storage& storage, const std::string& from, const std::string& to) {
  try {
    storage.rename(from, to);
    return true;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_found) throw;
    return false;
  }
}

bool rename_if(Storage& storage, const std::string& name, const std::string& own, FunctionRef<bool()> is_mine) {
  if (!rename_if_present(storage, name, own)) return false;
  try {
    if (is_mine()) return true;
  } catch (...) {
    put_back(storage, own, name);
    throw;
  }
  put_back(storage, own, name);
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

void commit(Storage& storage, const SaveTurn& turn, const CommitConditions& conditions, WriteMetadata write_metadata,
            Sidecar sidecar) {
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
    // take() has removed the metadata. Since then, a slow commit may have moved that of this save aside.
    if (const auto uncommitted = parse_uncommitted_name(name)) {
      const bool is_shard = uncommitted->name != kMetadataFileName && uncommitted->name != kRemovedName;
      return is_shard && uncommitted->generation < generation;
    }
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
