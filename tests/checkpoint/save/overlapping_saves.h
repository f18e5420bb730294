#pragma once
// Saves of one rank that tell by their elements which save a checkpoint is of.

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "checkpoint/save/saved_states.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"
#include "tessera/checkpoint/sidecar.h"

namespace tessera::checkpoint::saved {

using FileContents = std::map<std::string, Bytes>;  // by name

inline const Shape kSavedShape = {6, 4};

inline FlatState state_to_overlap(std::int64_t added) {
  return {tensor_entry("a", kSavedShape, {Box::full(kSavedShape)}, false, added),
          tensor_entry("b", kSavedShape, {Box::full(kSavedShape)}, false, added), object_entry("step", added)};
}

inline WriteOptions in_format(SaveFormat format, std::size_t files = 1) {
  WriteOptions options;
  options.format = format;
  options.files_per_rank = files;
  options.threads = 1;
  return options;
}

// Saves from one rank, and returns the error as "code: message", or "".
inline std::string overlapping_save(const std::shared_ptr<Storage>& storage, const FlatState& state,
                                    const WriteOptions& options, std::function<void()> before_commit = nullptr) {
  WriteOptions hooked = options;
  hooked.before_commit = std::move(before_commit);
  try {
    write_state(state, storage, alone(), hooked);
    return "";
  } catch (const Error& error) {
    return fmt::format("{}: {}", error_code_name(error.code()), error.what());
  }
}
inline std::string overlapping_save(const std::shared_ptr<Storage>& storage, std::int64_t added,
                                    const WriteOptions& options, std::function<void()> before_commit = nullptr) {
  return overlapping_save(storage, state_to_overlap(added), options, std::move(before_commit));
}

// Compares every element and returns which save the checkpoint is of, or -1.
inline std::int64_t save_in(const std::shared_ptr<Storage>& storage) {
  const auto checkpoint = Checkpoint::open(storage);
  for (const std::int64_t added : {2000, 1000, 3000, 4000}) {
    Wanted wanted;
    for (const char* name : {"a", "b"}) wanted.add(name, kSavedShape, {Box::full(kSavedShape)});
    read_state(wanted.targets, checkpoint);
    if (wanted.is_right(added)) return added;
  }
  return -1;
}

inline FileContents contents_in(const Storage& storage) {
  FileContents files;
  for (const std::string& name : storage.list()) files[name] = read_file(storage, name);
  return files;
}

// The files of the checkpoint, and its sidecar.
inline FileContents contents_of_checkpoint(const Storage& storage) {
  FileContents files;
  const std::optional<Sidecar> sidecar = read_sidecar(storage);
  if (!sidecar) return files;
  for (const auto& [name, facts] : sidecar->files) files[name] = read_file(storage, name);
  const std::string name(kSidecarFileName);
  files[name] = read_file(storage, name);
  return files;
}

}  // namespace tessera::checkpoint::saved
