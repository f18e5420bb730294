#include "checkpoint/source/known_items.h"

#include <algorithm>

#include "checkpoint/buffer.h"
#include "tessera/base/error.h"

namespace tessera::checkpoint {
namespace {

constexpr std::size_t kCrcBytes = sizeof(std::uint32_t);
// To make a form costs more than to parse an item, so it is made only for what occurs again.
constexpr std::size_t kMostForms = 4096;

// The sizes are those that a metadata file states, and may be anything.
bool fit_into(std::size_t size_bytes, DType dtype, std::span<const std::int64_t> sizes) {
  auto bytes = static_cast<std::uint64_t>(dtype_size(dtype));
  for (const std::int64_t size : sizes) {
    if (size < 1 || static_cast<std::uint64_t>(size) > size_bytes) return false;
    bytes *= static_cast<std::uint64_t>(size);
    if (bytes > size_bytes) return false;
  }
  return true;
}

std::optional<KnownItems::Elements> elements_between(const ItemForm& form, ByteView head, ByteView tail) {
  if (!std::equal(head.begin(), head.end(), form.head.begin())) return std::nullopt;
  const auto crc = load_little_endian<std::uint32_t>(tail.data() + form.crc_at.front());
  std::size_t at = 0;
  for (const std::size_t of_crc : form.crc_at) {
    if (!std::equal(tail.data() + at, tail.data() + of_crc, form.tail.data() + at) ||
        load_little_endian<std::uint32_t>(tail.data() + of_crc) != crc)
      return std::nullopt;
    at = of_crc + kCrcBytes;
  }
  if (!std::equal(tail.data() + at, tail.data() + tail.size(), form.tail.data() + at)) return std::nullopt;
  return KnownItems::Elements{head.size(), form.length_bytes, crc};
}

}  // namespace

// Returns the form of items of so many bytes; null if it is not known, or has no checksum.
const ItemForm* KnownItems::known_form(std::uint64_t length_bytes, DType dtype, std::span<const std::int64_t> sizes) {
  if (!fit_into(length_bytes, dtype, sizes)) return nullptr;
  const auto usable = [&](const ItemForm& form) {
    return form.crc_at.empty() || form.total_bytes() != length_bytes ? nullptr : &form;
  };
  const Forms::value_type* const last = last_.load(std::memory_order_acquire);
  if (last != nullptr && last->first.first == dtype && std::ranges::equal(last->first.second, sizes)) {
    return usable(*last->second);
  }
  const std::lock_guard lock(mutex_);
  const auto found = forms_.find(std::pair(dtype, sizes));
  if (found == forms_.end()) {
    if (forms_.size() < kMostForms) {
      forms_.emplace(ItemKind(dtype, {sizes.begin(), sizes.end()}), std::nullopt);
    }
    return nullptr;
  }
  if (!found->second) {
    try {
      found->second = item_form(dtype, sizes);
    } catch (const Error&) {  // of a dtype that is read and not written
      found->second = ItemForm();
    }
  }
  last_.store(&*found, std::memory_order_release);
  return usable(*found->second);
}

std::optional<KnownItems::Elements> KnownItems::find(ByteView item, DType dtype, std::span<const std::int64_t> sizes) {
  const ItemForm* const form = known_form(item.size(), dtype, sizes);
  if (form == nullptr) return std::nullopt;
  return elements_between(*form, item.first(form->head.size()), item.last(form->tail.size()));
}

std::optional<KnownItems::Elements> KnownItems::find(const ByteSource& file, std::uint64_t offset_bytes,
                                                     std::uint64_t length_bytes, DType dtype,
                                                     std::span<const std::int64_t> sizes) {
  const ItemForm* const form = known_form(length_bytes, dtype, sizes);
  if (form == nullptr) return std::nullopt;
  thread_local Buffer buffer;
  const MutableByteView both = buffer.get(form->head.size() + form->tail.size());
  const MutableByteView head = both.first(form->head.size()), tail = both.last(form->tail.size());
  file.read_at(offset_bytes, head);
  file.read_at(offset_bytes + length_bytes - tail.size(), tail);
  return elements_between(*form, head, tail);
}

}  // namespace tessera::checkpoint
