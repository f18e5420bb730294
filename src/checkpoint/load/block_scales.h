#pragma once
// The scales of tensors that are quantized in blocks.
// PyTorch: torch/distributed/checkpoint/quantized_hf_storage.py.

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"

namespace tessera::checkpoint {

// Returns the tensor that holds the scales of a tensor, or nothing if there is none: "x_scale_inv" for "x".
std::optional<std::size_t> find_scales(const Checkpoint& checkpoint, const TensorInfo& tensor);

// Returns the number of blocks along each dimension of a tensor. `block_size` is at least 1.
std::vector<std::int64_t> block_counts(const std::vector<std::int64_t>& shape, std::int64_t block_size);

class BlockScales {
 public:
  // Reads the scales, which are a tensor of the checkpoint with the shape block_counts of the tensor that they belong
  // to, of two dimensions. Throws Error(corrupt).
  BlockScales(const std::shared_ptr<const Checkpoint>& checkpoint, std::size_t scales, std::int64_t block_size,
              bool checks_checksums);
  // Multiplies the row-major elements of a box by the scales of their blocks.
  void apply(BoxView box, float* elements) const;

 private:
  std::int64_t block_size_, columns_;
  std::vector<float> scales_;  // row-major
};

}  // namespace tessera::checkpoint
