#pragma once
/// \file
/// Properties of a sharded tensor other than its shape. Every shard has the same ones.

#include <cstdint>
#include <string>

#include "tessera/base/dtype.h"

namespace tessera {

/// A memory format. PyTorch: `MEM_FORMAT_ENCODING`, with its values.
enum class MemoryFormat : std::uint8_t { contiguous = 0, channels_last = 1, preserve = 2 };

/// Returns "torch.contiguous_format", ...
std::string_view memory_format_name(MemoryFormat format);

/// The properties of a tensor. PyTorch: torch/distributed/_shard/sharded_tensor/metadata.py.
struct TensorProperties {
  DType dtype = DType::float32;
  std::string layout = "torch.strided";
  bool requires_grad = false;
  MemoryFormat memory_format = MemoryFormat::contiguous;
  bool pin_memory = false;
  bool operator==(const TensorProperties&) const = default;
};

/// Returns "float32, torch.strided", followed by the properties that differ from the defaults.
std::string to_string(const TensorProperties& properties);

}  // namespace tessera
