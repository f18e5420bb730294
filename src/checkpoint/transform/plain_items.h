#pragma once
// Stored items whose transforms are undone, so that any range of them can be read.

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "tessera/base/file.h"
#include "tessera/base/function_ref.h"
#include "tessera/checkpoint/transform.h"

namespace tessera::checkpoint {

// How many bytes of items are in memory. Thread-safe.
class MemoryOfItems {
 public:
  // Returns whether an item may take this many bytes more.
  bool take(std::uint64_t bytes) {
    if ((bytes_ += bytes) <= kLimitBytes) return true;
    bytes_ -= bytes;
    return false;
  }
  void give_back(std::uint64_t bytes) { bytes_ -= bytes; }

 private:
  static constexpr std::uint64_t kLimitBytes = std::uint64_t{64} << 20;
  std::atomic<std::uint64_t> bytes_ = 0;
};

// An item whose transforms are undone.
class PlainItem : public ByteSource {
 public:
  // Whether it has a file, which is open as long as the item exists.
  virtual bool has_file() const = 0;
};

// Returns the item of [offset_bytes, offset_bytes + length_bytes) of `file` with its transforms undone, the first
// descriptor's first. Keeps it in memory if it is small and `memory` has space, else in a temporary file without a
// name; other memory is bounded. Throws Error(corrupt) if the item has more than `limit_bytes`, and as the transforms.
std::shared_ptr<const PlainItem> undo_transforms(const ByteSource& file, std::uint64_t offset_bytes,
                                                 std::uint64_t length_bytes, std::span<const TransformPtr> transforms,
                                                 std::uint64_t limit_bytes,
                                                 const std::shared_ptr<MemoryOfItems>& memory);

// Keeps the items that were used last. A reader of rows of a tensor that is sharded along a later dimension uses an
// item of each rank in turn, so they must all be kept. Thread-safe; different items are made at the same time.
//
// Law: if the files of all items of the process take more than half of the descriptors that it may have open, or more
// than 4 GiB, none of its checkpoints keeps more than kAlwaysKept items with files after its next use of an item.
class PlainItems {
 public:
  using Make = FunctionRef<std::shared_ptr<const PlainItem>(const std::shared_ptr<MemoryOfItems>& memory)>;
  std::shared_ptr<const ByteSource> get(std::uint32_t number, Make make);

 private:
  static constexpr std::size_t kAlwaysKept = 16, kKept = 256;
  struct Slot {
    std::mutex mutex;
    std::shared_ptr<const PlainItem> item;  // null until it is made
    bool has_file = false;                  // guarded by PlainItems::mutex_
  };
  void drop_oldest();

  const std::shared_ptr<MemoryOfItems> memory_ = std::make_shared<MemoryOfItems>();
  std::mutex mutex_;
  std::deque<std::pair<std::uint32_t, std::shared_ptr<Slot>>> slots_;  // the one used last is at the end
};

}  // namespace tessera::checkpoint
