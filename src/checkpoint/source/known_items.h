#pragma once
// Recognises items of DCP data files that have the form in which tessera writes a tensor, without parsing them.
//
// Law: an item is recognised only if parsing it would find the same tensor. All of its bytes but the elements are
// compared.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
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
  // As above, for an item in a file, of which it reads all but the elements.
  std::optional<Elements> find(const ByteSource& file, std::uint64_t offset_bytes, std::uint64_t length_bytes,
                               DType dtype, std::span<const std::int64_t> sizes);

 private:
  const ItemForm* known_form(std::uint64_t length_bytes, DType dtype, std::span<const std::int64_t> sizes);

  using Forms = std::map<ItemKind, std::optional<ItemForm>, ItemKindLess>;

  std::mutex mutex_;  // of `forms_`; a form that was made does not change
  Forms forms_;
  std::atomic<const Forms::value_type*> last_ = nullptr;  // of the forms that were made, the one that was used last
};

}  // namespace tessera::checkpoint
