#pragma once
// Recognises items of DCP data files that have the form in which tessera writes a tensor, without parsing them.
//
// Law: an item is recognised only if parsing it would find the same tensor. All of its bytes but the elements are
// compared.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "checkpoint/save/item_layouts.h"
#include "tessera/base/bytes.h"
#include "tessera/base/dtype.h"

namespace tessera::checkpoint {

// Thread-safe.
class KnownItems {
 public:
  // The elements of an item: where they begin in it, and their CRC-32 according to the item.
  struct Elements {
    std::uint64_t offset_bytes = 0, length_bytes = 0;
    std::uint32_t crc32 = 0;
  };
  // Returns nothing for an item of another form, and for the first one of its dtype and sizes.
  std::optional<Elements> find(ByteView item, DType dtype, std::span<const std::int64_t> sizes);

 private:
  using Key = std::pair<DType, std::span<const std::int64_t>>;
  struct Less {
    using is_transparent = void;
    bool operator()(const auto& a, const auto& b) const {
      return a.first != b.first ? a.first < b.first : std::ranges::lexicographical_compare(a.second, b.second);
    }
  };
  const ItemForm* known_form(DType dtype, std::span<const std::int64_t> sizes);

  std::mutex mutex_;
  std::map<std::pair<DType, std::vector<std::int64_t>>, std::optional<ItemForm>, Less> forms_;
};

}  // namespace tessera::checkpoint
