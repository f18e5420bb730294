#pragma once
/// \file
/// The variants of `.metadata` that versions of PyTorch write and read.

#include <cstdint>

namespace tessera::dcp {

/// Which PyTorch wrote it, as far as it can be seen, and so which class names are written.
enum class Dialect : std::uint8_t {
  torch_1_13,  ///< classes under torch.distributed._shard; loaded by 1.13 (and later ones while they keep that alias)
  torch_2_0,   ///< as torch_2, TensorProperties still under torch.distributed._shard; loaded by every 2.x
  torch_2,     ///< classes under torch.distributed.checkpoint, no `version`; loaded by 2.3 and later
  torch_2_14,  ///< with `version`; loaded by 2.3 and later, too
};

}  // namespace tessera::dcp
