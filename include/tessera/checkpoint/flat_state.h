#pragma once
/// \file
/// One rank's part of a state to save: named tensors, with the chunks that this rank has, and named objects.
///
/// Names are flat ("model.layer.0.weight") and unique. A path is the position of a value in the nested state dict. The
/// owner of the elements (LibTorch tensors, a program's own memory) provides them as strided host memory when they are
/// about to be written.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/state_path.h"
#include "tessera/layout/box.h"
#include "tessera/layout/tensor_properties.h"

namespace tessera::checkpoint {

/// Elements of a chunk in host memory: element x is at data + sum(x[d] * strides[d]) * element size. Elements that are
/// elsewhere, such as on a GPU, are read by a function in parts, so that no copy of all of them is needed.
struct HostMemory {
  const std::uint8_t* data = nullptr;
  std::vector<std::int64_t> strides;  ///< in elements, >= 0; empty for row-major
  std::shared_ptr<const void> owner;  ///< keeps the elements alive until they are written; null if not needed
  /// If set, it is called instead of reading `data`, from any thread: copies `out.size()` bytes of the elements, in
  /// row-major order from byte `begin_bytes` on. Parts begin and end between elements.
  std::function<void(std::uint64_t begin_bytes, MutableByteView out)> read = nullptr;
};

struct StateChunk {
  Box box;  ///< in the full tensor
  /// Returns the elements. Called once, from any thread, when the chunk is about to be written; never called if another
  /// rank writes the chunk.
  std::function<HostMemory()> memory;
};

struct StateTensor {
  std::optional<TensorProperties> properties = TensorProperties();  ///< nullopt if not known, then without chunks
  std::vector<std::int64_t> shape;                                  ///< of the full tensor
  std::vector<StateChunk> chunks;  ///< chunks that this rank has; other ranks may have the same ones
};

struct StateObject {
  /// Returns the object as a torch.save archive. Called once, and only on the rank that writes the object.
  std::function<Bytes()> archive;
};

struct StateEntry {
  std::string name;
  Path path;
  std::variant<StateTensor, StateObject> value;
};

using FlatState = std::vector<StateEntry>;

}  // namespace tessera::checkpoint
