#pragma once
// Layouts of the torch.save archives that hold the chunks of a DCP checkpoint.

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

// The archive's top folder, as torch.save names it when it writes to a stream.
inline constexpr const char* kItemPrefix = "archive";

// Returns the layout of a chunk's archive, which depends only on dtype and sizes.
torch_archive::ArchiveLayout chunk_layout(DType dtype, std::span<const std::int64_t> sizes);

// A cache of chunk layouts, since many chunks share one. Thread-safe.
class ItemLayouts {
 public:
  std::shared_ptr<const torch_archive::ArchiveLayout> of_chunk(DType dtype, std::span<const std::int64_t> sizes);

 private:
  std::mutex mutex_;
  std::map<std::pair<DType, std::vector<std::int64_t>>, std::shared_ptr<const torch_archive::ArchiveLayout>> layouts_;
};

}  // namespace tessera::checkpoint
