#pragma once
/// \file
/// The variants of `.metadata` that different versions of PyTorch read and write.

#include <cstdint>

namespace tessera::dcp {

/// The PyTorch version that wrote the file, as far as the file shows it. Selects the class names that are written.
enum class Dialect : std::uint8_t {
  torch_1_13,  ///< classes under torch.distributed._shard; loaded by 1.13, and by later versions that keep that alias
  torch_2_0,   ///< as torch_2, but TensorProperties is still under torch.distributed._shard; loaded by every 2.x
  torch_2,     ///< classes under torch.distributed.checkpoint, no `version`; loaded by 2.3 and later
  torch_2_14,  ///< as torch_2, with `version`; loaded by 2.3 and later
};

}  // namespace tessera::dcp
