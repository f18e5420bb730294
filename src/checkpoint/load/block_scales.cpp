#include "checkpoint/load/block_scales.h"

#include <algorithm>
#include <string>

#include "tessera/base/cast.h"
#include "tessera/checkpoint/tensor_reader.h"

namespace tessera::checkpoint {

std::optional<std::size_t> find_scales(const Checkpoint& checkpoint, const TensorInfo& tensor) {
  return checkpoint.find_tensor(tensor.name + "_scale_inv");
}

std::vector<std::int64_t> block_counts(const std::vector<std::int64_t>& shape, std::int64_t block_size) {
  std::vector<std::int64_t> counts;
  counts.reserve(shape.size());
  for (const std::int64_t size : shape) counts.push_back(size / block_size + (size % block_size != 0 ? 1 : 0));
  return counts;
}

BlockScales::BlockScales(const std::shared_ptr<const Checkpoint>& checkpoint, std::size_t scales,
                         std::int64_t block_size, bool checks_checksums)
    : block_size_(block_size), columns_(checkpoint->tensors()[scales].shape[1]) {
  const TensorReader reader(checkpoint, scales, checks_checksums);
  const TensorInfo& info = reader.info();
  Bytes stored(info.size_bytes());
  reader.read(Box::full(info.shape), stored);
  reader.verify_checksums();
  scales_.resize(stored.size() / static_cast<std::size_t>(dtype_size(info.dtype)));
  cast(info.dtype, stored.data(), DType::float32, reinterpret_cast<std::uint8_t*>(scales_.data()),
       static_cast<std::int64_t>(scales_.size()));
}

void BlockScales::apply(BoxView box, float* elements) const {
  const std::int64_t end = box.offsets[1] + box.sizes[1];
  for (std::int64_t row = box.offsets[0]; row < box.offsets[0] + box.sizes[0]; ++row) {
    const float* const of_row = scales_.data() + row / block_size_ * columns_;
    for (std::int64_t column = box.offsets[1]; column < end;) {
      const std::int64_t block = column / block_size_;
      const std::int64_t block_end = std::min(end, (block + 1) * block_size_);
      for (; column < block_end; ++column) *elements++ *= of_row[block];
    }
  }
}

}  // namespace tessera::checkpoint
