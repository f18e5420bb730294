#pragma once
// A temporary folder that becomes the destination with one rename.

#include <filesystem>

namespace tessera::checkpoint {

// The folder `.<name>.tessera-<process>-<n>.partial` next to the destination, locked while its process lives. The
// destructor removes the folder and its contents unless it was committed.
class Staging {
 public:
  // Creates the folder, and removes folders that killed processes left for the same destination. Throws as
  // check_destination.
  Staging(const std::filesystem::path& destination, const std::filesystem::path& source);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // The folder to write to. Subdirectories are not synced.
  const std::filesystem::path& folder() const { return folder_; }

  // Makes the folder itself the destination: syncs it, renames it, syncs the parent.
  void commit_folder();
  // Renames one file in the folder to the destination. If `companion` is not empty, first renames that file to
  // `<destination><suffix>`, replacing an existing file, which belongs to no file. Several processes may do so for one
  // destination at once: one of them succeeds. The destructor then removes the folder.
  void commit_file(const std::filesystem::path& file, const std::filesystem::path& companion,
                   const std::string& suffix);

  // Throws Error(invalid_argument) if `destination` exists, is `source` or is inside it, and Error(not_found) if its
  // parent directory does not exist.
  static void check_destination(const std::filesystem::path& destination, const std::filesystem::path& source);

 private:
  void remove_leftovers() const;
  void sync_parent() const;
  std::filesystem::path destination_, parent_, folder_;
  int lock_ = -1;  // descriptor of the folder, with flock
};

}  // namespace tessera::checkpoint
