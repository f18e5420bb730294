#pragma once
// Layouts of the torch.save archives that hold the chunks of a DCP checkpoint.

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/dtype.h"
#include "tessera/format/torch_archive.h"
#include "tessera/layout/box.h"

namespace tessera::checkpoint {

// The archive's top folder, as torch.save names it when it writes to a stream.
inline constexpr const char* kItemPrefix = "archive";

// Returns the layout of a chunk's archive, which depends only on dtype and sizes.
torch_archive::ArchiveLayout chunk_layout(DType dtype, std::span<const std::int64_t> sizes);

// What the archive of a chunk has before and after its elements. The second part has their CRC-32 in several places.
struct ItemForm {
  Bytes head, tail;
  std::uint64_t length_bytes = 0;   // of the elements
  std::vector<std::size_t> crc_at;  // in `tail`; none if there are no elements

  std::uint64_t total_bytes() const { return head.size() + length_bytes + tail.size(); }
  Bytes tail_with(std::uint32_t crc32) const;
};
ItemForm item_form(DType dtype, std::span<const std::int64_t> sizes);

// What a form depends on. Maps by it can be searched with a span in place of the vector.
using ItemKind = std::pair<DType, std::vector<std::int64_t>>;
struct ItemKindLess {
  using is_transparent = void;
  bool operator()(const auto& a, const auto& b) const {
    return a.first != b.first ? a.first < b.first : std::ranges::lexicographical_compare(a.second, b.second);
  }
};

// A cache of forms, since many chunks share one. Thread-safe.
class ItemForms {
 public:
  std::shared_ptr<const ItemForm> of_chunk(DType dtype, std::span<const std::int64_t> sizes);

 private:
  std::mutex mutex_;
  std::map<ItemKind, std::shared_ptr<const ItemForm>, ItemKindLess> forms_;
};

}  // namespace tessera::checkpoint
