#pragma once
/// \file
/// A storage that fails on command, for tests of whatever saves: that an error, a full disk or a crash at any step
/// leaves what was there before, or what is new, whole.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tessera/checkpoint/storage.h"

namespace tessera::checkpoint {

enum class StorageStep : std::uint8_t { prepare, list, open, read, create, write, finish, rename, remove, sync };
std::string_view storage_step_name(StorageStep step);

struct StorageEvent {
  StorageStep step = StorageStep::prepare;
  std::string file;          ///< empty for prepare, list and sync
  std::uint64_t number = 0;  ///< how many events were before it
};

enum class StorageFault : std::uint8_t {
  none,
  io_error,     ///< nothing happens but `Error(io)`
  short_write,  ///< of a write, the first half is done, then `Error(io)`
};

/// Does what `inner` does, but asks `decide` before each step, from any thread. What `decide` throws is thrown instead.
std::shared_ptr<Storage> faulty_storage(std::shared_ptr<Storage> inner,
                                        std::function<StorageFault(const StorageEvent&)> decide);

}  // namespace tessera::checkpoint
