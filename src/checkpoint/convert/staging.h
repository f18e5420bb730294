#pragma once
// A temporary folder that becomes the destination with one rename.

#include <filesystem>

#include "checkpoint/storage/directory_lock.h"

namespace tessera::checkpoint {

// What happens to a destination that exists.
enum class Existing : bool { refuse, replace };

// The folder `.<name>.tessera-<process>-<n>.partial` next to the destination, locked while its process lives. The
// destructor removes the folder and its contents unless it was committed.
class Staging {
 public:
  // Creates the folder, and removes folders that killed processes left for the same destination. Throws as
  // check_destination.
  Staging(const std::filesystem::path& destination, const std::filesystem::path& source, Existing existing);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // The folder to write to. Subdirectories are not synced.
  const std::filesystem::path& folder() const { return folder_; }

  // Makes the folder itself the destination: syncs it, renames it, syncs the parent. A destination that exists is
  // exchanged with the folder, and removed by the destructor.
  void commit_folder();
  // Renames one file in the folder to the destination. If `companion` is not empty, first renames that file to
  // `<destination><suffix>`, replacing an existing file, which belongs to no file; if it is empty, removes that one.
  // Several processes may do so for one destination at once: one of them succeeds. The destructor then removes the
  // folder. A destination that exists is replaced: it first loses its companion, and then the new one gets its own, so
  // that no companion is of another file.
  void commit_file(const std::filesystem::path& file, const std::filesystem::path& companion,
                   const std::string& suffix);

  // Throws Error(invalid_argument) if `destination` is `source`, or one is inside the other; if it exists, unless it is
  // to be replaced and is a file or the directory of a checkpoint, without directories in it; and Error(not_found) if
  // its parent directory does not exist.
  static void check_destination(const std::filesystem::path& destination, const std::filesystem::path& source,
                                Existing existing);

 private:
  void remove_leftovers() const;
  void sync_parent() const;
  std::filesystem::path destination_, parent_, folder_;
  Existing existing_;
  DirectoryLock lock_;  // of the folder
};

}  // namespace tessera::checkpoint
