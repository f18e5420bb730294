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

std::shared_ptr<const torch_archive::ArchiveLayout> ItemLayouts::of_chunk(DType dtype,
                                                                          std::span<const std::int64_t> sizes) {
  const std::lock_guard lock(mutex_);
  auto& layout = layouts_[{dtype, {sizes.begin(), sizes.end()}}];
  if (layout == nullptr) layout = std::make_shared<const torch_archive::ArchiveLayout>(chunk_layout(dtype, sizes));
  return layout;
}

}  // namespace tessera::checkpoint
