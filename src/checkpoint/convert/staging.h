#pragma once
// A destination that appears whole or not at all.

#include <filesystem>

namespace tessera::checkpoint {

// Where output is written before it gets its name: a folder `.<name>.tessera-<process>-<n>.partial` beside the
// destination, locked while its process lives. If it isn't committed it is removed, with all in it, when the object
// goes.
class Staging {
 public:
  // Throws Error(invalid_argument) if `destination` exists, is or lies within `source`, or has no parent directory;
  // removes what killed processes left of earlier tries at the same destination.
  Staging(const std::filesystem::path& destination, const std::filesystem::path& source);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // The folder to write into. Subdirectories aren't synced.
  const std::filesystem::path& folder() const { return folder_; }

  // Makes the folder itself the destination: syncs it, renames it, syncs the parent.
  void commit_folder();
  // Makes one file in the folder the destination, and, if it isn't empty, another one `<destination><suffix>` before it
  // (replacing what is there); the folder is then removed.
  void commit_file(const std::filesystem::path& file, const std::filesystem::path& companion,
                   const std::string& suffix);

  // Checks alone, for a dry run.
  static void check_destination(const std::filesystem::path& destination, const std::filesystem::path& source);

 private:
  void remove_leftovers() const;
  std::filesystem::path destination_, parent_, folder_;
  int lock_ = -1;  // descriptor of the folder, with flock
};

}  // namespace tessera::checkpoint
