#pragma once
// Stored items whose transforms are undone, so that any range of them can be read.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "tessera/base/file.h"
#include "tessera/checkpoint/transform.h"

namespace tessera::checkpoint {

// Returns the item of [offset_bytes, offset_bytes + length_bytes) of `file` with its transforms undone, the first
// descriptor's first. Keeps it in memory if it is small, else in a temporary file without a name; other memory is
// bounded. Throws Error(corrupt) if the item has more than `limit_bytes`, and as the transforms.
std::shared_ptr<const ByteSource> undo_transforms(const ByteSource& file, std::uint64_t offset_bytes,
                                                  std::uint64_t length_bytes, std::span<const TransformPtr> transforms,
                                                  std::uint64_t limit_bytes);

// Keeps the items that were used last, a few of them. Thread-safe; different items are made at the same time.
class PlainItems {
 public:
  using Make = std::function<std::shared_ptr<const ByteSource>()>;
  std::shared_ptr<const ByteSource> get(std::uint32_t number, const Make& make);

 private:
  static constexpr std::size_t kKept = 16;
  struct Slot {
    std::mutex mutex;
    std::shared_ptr<const ByteSource> item;  // null until it is made
  };
  std::mutex mutex_;
  std::deque<std::pair<std::uint32_t, std::shared_ptr<Slot>>> slots_;  // the one used last is at the end
};

}  // namespace tessera::checkpoint
