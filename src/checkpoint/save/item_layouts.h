#pragma once
// The archives in which a DCP checkpoint stores items.

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/format/torch_archive.h"
#include "tessera/layout/box.h"

namespace tessera::checkpoint {

// As torch.save names the top folder when it writes into a stream.
inline constexpr const char* kItemPrefix = "archive";

// Of a chunk, which depends on dtype and sizes alone.
torch_archive::ArchiveLayout chunk_layout(DType dtype, std::span<const std::int64_t> sizes);

// Keeps those that were asked for: many chunks have the same. Any thread.
class ItemLayouts {
 public:
  std::shared_ptr<const torch_archive::ArchiveLayout> of_chunk(DType dtype, std::span<const std::int64_t> sizes);

 private:
  std::mutex mutex_;
  std::map<std::pair<DType, std::vector<std::int64_t>>, std::shared_ptr<const torch_archive::ArchiveLayout>> layouts_;
};

}  // namespace tessera::checkpoint
