#pragma once
/// \file
/// One rank's part of a state that is to be saved: named tensors, of which it has some chunks, and named objects.
///
/// Names are flat ("model.layer.0.weight") and unique; a path says where the value stands in the nested state dict.
/// Whatever holds the elements (LibTorch's tensors, a program's own memory) gives them as strided memory of the host
/// when they are about to be written.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/state_path.h"
#include "tessera/layout/box.h"
#include "tessera/layout/tensor_properties.h"

namespace tessera::checkpoint {

/// Elements that someone else owns: element x of a chunk is at data + sum(x[d] * strides[d]) * element size.
struct HostMemory {
  const std::uint8_t* data = nullptr;
  std::vector<std::int64_t> strides;  ///< in elements, >= 0; empty: row-major
  std::shared_ptr<const void> owner;  ///< released when the elements are written; null: they stay anyway
};

struct StateChunk {
  Box box;  ///< in the whole tensor
  /// Called once, by any thread, when the chunk is about to be written; not at all if another rank writes it.
  std::function<HostMemory()> memory;
};

struct StateTensor {
  TensorProperties properties;
  std::vector<std::int64_t> shape;  ///< of the whole tensor
  std::vector<StateChunk> chunks;   ///< those that this rank has; they may be other ranks', too
};

struct StateObject {
  /// The torch.save archive of it. Called once, if this rank is the one that writes the object.
  std::function<Bytes()> archive;
};

struct StateEntry {
  std::string name;
  Path path;
  std::variant<StateTensor, StateObject> value;
};

using FlatState = std::vector<StateEntry>;

}  // namespace tessera::checkpoint
