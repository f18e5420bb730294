#pragma once
/// \file
/// What a sharded tensor is besides its shape: the properties that every shard of it has.

#include <cstdint>
#include <string>

#include "tessera/base/dtype.h"

namespace tessera {

enum class MemoryFormat : std::uint8_t { contiguous = 0, channels_last = 1, preserve = 2 };

/// "torch.contiguous_format", ...
std::string_view memory_format_name(MemoryFormat format);

/// PyTorch: torch/distributed/_shard/sharded_tensor/metadata.py
struct TensorProperties {
  DType dtype = DType::float32;
  std::string layout = "torch.strided";
  bool requires_grad = false;
  MemoryFormat memory_format = MemoryFormat::contiguous;
  bool pin_memory = false;
  bool operator==(const TensorProperties&) const = default;
};

/// "float32, torch.strided", and what differs from the defaults behind it.
std::string to_string(const TensorProperties& properties);

}  // namespace tessera
