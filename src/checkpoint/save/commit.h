#pragma once
// Commits a DCP checkpoint whose data files are durable. Also admits one commit at a time, of any format.

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/consult.h"
#include "tessera/base/bytes.h"
#include "tessera/base/function_ref.h"
#include "tessera/checkpoint/sidecar.h"
#include "tessera/checkpoint/storage.h"

namespace tessera::checkpoint {

// The place of a save among those to one storage. Saves may overlap in time, also with one that is killed.
//
// Law: a save renames and removes no file of a save that began later or is of the same generation. Only one commit runs
// at a time: it has the sidecar under its temporary name. A commit throws if a save that began later was committed
// before, or has removed its files.
struct SaveTurn {
  // Larger than that of any file that exists here, and of the save that wrote the sidecar: ranks may have their own
  // disks.
  std::int64_t generation = 0;
  // The temporary sidecar when the save began. If it is the same when the save commits, it was left by a killed save.
  std::optional<Bytes> left_sidecar = std::nullopt;
};
SaveTurn begin_save(const Storage& storage);

// The temporary sidecar of a storage, which one commit at a time has. Its contents identify the commit: those of a save
// have its generation and the names and checksums of its files. Saves of one generation do not have the same files,
// because each creates its files. `tessera sum` writes no generation.
//
// A save cannot tell a commit that is slow from one that was killed, and takes over from both. Law: after that, the
// slow commit throws and changes no file of the other save, whatever it was about to do.
//   - It renames the temporary sidecar, and files from names that only it uses, and calls is_held() after it created
//     them and right before. The other save first replaces the temporary sidecar and then removes or renames these
//     files, so that either is_held() returns false or the rename fails.
//   - It renames and removes files of other names, to undo what it did, by rename_if() alone.
//   - The other save removes files that the slow commit moved aside by rename_if() in take() only. Later, one of them
//     may be a file of the other save, which the slow commit is about to put back.
class CommitLock {
 public:
  CommitLock(Storage& storage, const SaveTurn& turn) : storage_(storage), turn_(turn) {}

  // Creates the temporary sidecar of a save with the contents of its sidecar, and makes them durable. Before, completes
  // or removes one that a killed save or `tessera sum` left, or that `tessera sum` has. Removes the uncommitted
  // metadata of saves that began earlier, and what they moved aside. Returns the names of the files that the storage
  // has then, sorted. Throws Error(invalid_argument) if another save is being committed.
  std::vector<std::string> take(Bytes contents);
  // Creates the temporary sidecar for `tessera sum`, which changes no other file. Therefore, unlike a save, it removes
  // nothing of saves, and takes over only from what it left itself when it was killed, or from what is not complete.
  // Throws Error(invalid_argument) if there is another one, even if that is of a killed save.
  void take_between_saves(Bytes contents);
  // Creates the temporary sidecar. Throws Error(invalid_argument) if there is one.
  void create(Bytes contents);
  // Returns whether the temporary sidecar is that of this commit.
  bool is_held() const;
  // Throws Error(invalid_argument) if it is not.
  void require_held();
  // Renames the temporary sidecar to the sidecar. If that was the one of another commit, or there is another
  // `.metadata` than the one that `sidecar` lists, puts both sidecars back and throws Error(invalid_argument).
  void become_sidecar(const Sidecar& sidecar);
  // Returns whether require_held() or become_sidecar() has found that another save took over.
  bool is_overtaken() const { return is_overtaken_; }
  // Removes the temporary sidecar if it is that of this commit, or what a failed write left of it. One that cannot be
  // removed is completed or removed by the next save.
  void release() noexcept;

 private:
  [[noreturn]] void fail_as_overtaken();
  void require_none(std::string_view advice) const;

  Storage& storage_;
  const SaveTurn& turn_;
  std::optional<Bytes> contents_;  // if it was created
  bool is_written_ = false;        // completely
  bool is_overtaken_ = false;
};

// Renames a file whose name only this save and those that take over from it use. Returns false if it is not there: one
// of these took it.
bool rename_if_present(Storage& storage, const std::string& from, const std::string& to);

// Renames `name` to `own`, which only this save uses, and calls `is_mine` afterwards, because no storage compares and
// renames in one step. If it returns false, the file may be of another save: renames it back, unless there is a newer
// file of that name, which replaces it, and returns false. Also returns false if there is no file `name`.
bool rename_if(Storage& storage, const std::string& name, const std::string& own, FunctionRef<bool()> is_mine);

// Returns a name, which only this save uses, for a file that is removed if it is this save's. Later saves remove it.
std::string name_to_remove(const SaveTurn& turn);

// Throws Error(invalid_argument) unless each of the files `own` is among `names`, the sorted files of the storage.
void require_present(const Storage& storage, const std::vector<std::string>& names,
                     const std::vector<std::string>& own);

// What must hold when a save is committed, besides that no other one was that began later.
struct CommitConditions {
  bool overwrite = true;               // whether a checkpoint may be replaced
  std::vector<std::string> own_files;  // written by this rank: they must be there. Other ranks may have their own disks
};

// Replaces `.metadata` and then the sidecar, each by renaming a durable file. Between the two renames, the sidecar that
// belongs to `.metadata` has its temporary name; read_sidecar() handles that. `sidecar` must not list `.metadata`. If
// anything fails, restores the old files and rethrows the exception. `write_metadata` passes the bytes of `.metadata`
// to a sink, in order and in any pieces.
//
// Law: after `.metadata` may have been renamed, nothing that either `.metadata` names may be removed until one of them
// is durable. If the old one cannot be restored and made durable, throws OutcomeUnknown: the storage holds one of the
// two checkpoints, or that of a save that took over, and the caller must not remove files of any.
using WriteMetadata = FunctionRef<void(FunctionRef<void(ByteView bytes)> sink)>;
void commit(Storage& storage, const SaveTurn& turn, const CommitConditions& conditions, WriteMetadata write_metadata,
            Sidecar sidecar);

// Removes data files and uncommitted shards of generations before `generation`, and metadata of single ranks, except
// those in `referenced`. Returns the files that could not be removed, with the reasons. Does not throw: it runs after
// the commit.
std::vector<std::string> remove_unreferenced(Storage& storage, const std::set<std::string>& referenced,
                                             std::int64_t generation);

}  // namespace tessera::checkpoint
