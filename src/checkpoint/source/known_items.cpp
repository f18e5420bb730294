#include "checkpoint/source/known_items.h"

#include <algorithm>

#include "checkpoint/save/item_layouts.h"
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

}  // namespace

KnownItems::Form KnownItems::form_of(DType dtype, std::span<const std::int64_t> sizes) {
  const torch_archive::ArchiveLayout layout = chunk_layout(dtype, sizes);
  Form form;
  form.head = layout.before_storage(0, {});
  form.length_bytes = layout.storage_size_bytes(0);
  form.tail = layout.trailer({0});
  // All bytes of these checksums differ.
  const Bytes other = layout.trailer({UINT32_MAX});
  for (std::size_t at = 0; at < form.tail.size();) {
    if (form.tail[at] == other[at]) {
      ++at;
      continue;
    }
    form.crc_at.push_back(at);
    at += kCrcBytes;
  }
  return form;
}

const KnownItems::Form* KnownItems::known_form(DType dtype, std::span<const std::int64_t> sizes) {
  std::pair<DType, std::vector<std::int64_t>> key(dtype, {sizes.begin(), sizes.end()});
  const std::lock_guard lock(mutex_);
  const auto found = forms_.find(key);
  if (found == forms_.end()) {
    if (forms_.size() < kMostForms) forms_.emplace(std::move(key), std::nullopt);
    return nullptr;
  }
  if (!found->second) {
    try {
      found->second = form_of(dtype, sizes);
    } catch (const Error&) {  // of a dtype that is read and not written
      found->second = Form();
    }
  }
  return &*found->second;
}

std::optional<KnownItems::Elements> KnownItems::find(ByteView item, DType dtype, std::span<const std::int64_t> sizes) {
  if (!fit_into(item.size(), dtype, sizes)) return std::nullopt;
  const Form* const form = known_form(dtype, sizes);
  if (form == nullptr || item.size() != form->head.size() + form->length_bytes + form->tail.size()) return std::nullopt;
  const ByteView head = item.first(form->head.size()), tail = item.last(form->tail.size());
  if (!std::equal(head.begin(), head.end(), form->head.begin())) return std::nullopt;
  const auto crc = load_little_endian<std::uint32_t>(tail.data() + form->crc_at.front());
  std::size_t at = 0;
  for (const std::size_t of_crc : form->crc_at) {
    if (!std::equal(tail.data() + at, tail.data() + of_crc, form->tail.data() + at) ||
        load_little_endian<std::uint32_t>(tail.data() + of_crc) != crc)
      return std::nullopt;
    at = of_crc + kCrcBytes;
  }
  if (!std::equal(tail.data() + at, tail.data() + tail.size(), form->tail.data() + at)) return std::nullopt;
  return Elements{head.size(), form->length_bytes, crc};
}

}  // namespace tessera::checkpoint
