#pragma once
/// \file
/// A storage that fails on command, for tests of saving: an error, a full disk or a crash at any step must leave either
/// the old or the new checkpoint intact.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tessera/checkpoint/storage.h"

namespace tessera::checkpoint {

enum class StorageStep : std::uint8_t { prepare, list, open, read, create, write, finish, rename, remove, sync };
/// Returns the name of `step`.
std::string_view storage_step_name(StorageStep step);

struct StorageEvent {
  StorageStep step = StorageStep::prepare;
  std::string file;          ///< empty for prepare, list and sync
  std::uint64_t number = 0;  ///< number of events before this one
};

enum class StorageFault : std::uint8_t {
  none,
  io_error,     ///< throws `Error(io)` without doing the step
  short_write,  ///< a write stores the first half, then throws `Error(io)`; other steps fail as with io_error
};

/// Returns a storage that forwards to `inner` and calls `decide` before each step, from any thread. If `decide` throws,
/// the step throws that exception.
std::shared_ptr<Storage> faulty_storage(std::shared_ptr<Storage> inner,
                                        std::function<StorageFault(const StorageEvent&)> decide);

}  // namespace tessera::checkpoint
