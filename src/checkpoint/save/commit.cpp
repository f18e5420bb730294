#include "checkpoint/save/commit.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "tessera/base/crc32.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/internal/file_names.h"

namespace tessera::checkpoint {
namespace {

// A file to be replaced by a temporary file, with its old contents for an undo.
class Replacement {
 public:
  Replacement(Storage& storage, std::string_view name)
      : storage_(storage), name_(name), temporary_(name_ + std::string(kTemporarySuffix)) {
    storage_.remove(temporary_);
    if (storage_.size_bytes(name_)) before_ = read_file(storage_, name_);
  }

  void write(ByteView bytes) { write_new_file(storage_, temporary_, bytes); }

  void replace() {
    storage_.rename(temporary_, name_);
    replaced_ = true;
  }

  // Restores the old state. Throws if that fails.
  void undo() {
    storage_.remove(temporary_);
    if (!replaced_) return;
    if (before_) {
      write_new_file(storage_, temporary_, *before_);
      storage_.rename(temporary_, name_);
    } else {
      storage_.remove(name_);
    }
    replaced_ = false;
  }

 private:
  Storage& storage_;
  std::string name_, temporary_;
  std::optional<Bytes> before_;
  bool replaced_ = false;
};

}  // namespace

std::int64_t next_generation(const Storage& storage) {
  std::int64_t next = 0;
  for (const std::string& name : storage.list()) {
    if (const auto data = parse_data_file_name(name)) next = std::max(next, data->generation + 1);
  }
  return next;
}

void commit(Storage& storage, const Bytes& metadata, Sidecar sidecar) {
  Replacement metadata_file(storage, kMetadataFileName), sidecar_file(storage, kSidecarFileName);
  try {
    sidecar.files[std::string(kMetadataFileName)] = {metadata.size(), crc32(metadata)};
    sidecar_file.write(write_sidecar(sidecar));
    metadata_file.write(metadata);
    storage.sync();
    metadata_file.replace();
    storage.sync();
    sidecar_file.replace();
    storage.sync();
  } catch (const Error& error) {
    try {
      metadata_file.undo();
      sidecar_file.undo();
    } catch (const Error& second) {
      fail(error.code(), "{}; restoring the old checkpoint failed too: {}", error.what(), second.what());
    }
    throw;
  }
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
