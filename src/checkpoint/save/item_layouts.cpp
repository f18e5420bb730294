#include "checkpoint/save/item_layouts.h"

#include "tessera/format/pickle_writer.h"
#include "tessera/layout/byte_ranges.h"

namespace tessera::checkpoint {

torch_archive::ArchiveLayout chunk_layout(DType dtype, std::span<const std::int64_t> sizes) {
  torch_archive::TensorRef tensor;
  tensor.dtype = dtype;
  tensor.sizes.assign(sizes.begin(), sizes.end());
  tensor.strides = row_major_strides(sizes);
  std::int64_t bytes = dtype_size(dtype);
  for (const std::int64_t size : sizes) bytes *= size;
  tensor.storage = {"0", "cpu", dtype, bytes};
  Bytes data_pkl;
  pickle::Writer writer(data_pkl, 2);
  torch_archive::write_tensor(writer, tensor);
  writer.stop();
  return {kItemPrefix, std::move(data_pkl), {{"0", static_cast<std::uint64_t>(bytes)}}};
}

ItemForm item_form(DType dtype, std::span<const std::int64_t> sizes) {
  const torch_archive::ArchiveLayout layout = chunk_layout(dtype, sizes);
  ItemForm form;
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
    at += sizeof(std::uint32_t);
  }
  return form;
}

Bytes ItemForm::tail_with(std::uint32_t crc32) const {
  Bytes bytes = tail;
  for (const std::size_t at : crc_at) {
    for (std::size_t i = 0; i < sizeof crc32; ++i) bytes[at + i] = static_cast<std::uint8_t>(crc32 >> (8 * i));
  }
  return bytes;
}

std::shared_ptr<const ItemForm> ItemForms::of_chunk(DType dtype, std::span<const std::int64_t> sizes) {
  const std::lock_guard lock(mutex_);
  if (const auto found = forms_.find(std::pair(dtype, sizes)); found != forms_.end()) return found->second;
  auto form = std::make_shared<const ItemForm>(item_form(dtype, sizes));
  forms_.emplace(ItemKind(dtype, {sizes.begin(), sizes.end()}), form);
  return form;
}

}  // namespace tessera::checkpoint
