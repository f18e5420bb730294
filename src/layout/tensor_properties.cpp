#include "tessera/layout/tensor_properties.h"

#include <fmt/format.h>

namespace tessera {

std::string_view memory_format_name(MemoryFormat format) {
  switch (format) {
    case MemoryFormat::contiguous:
      return "torch.contiguous_format";
    case MemoryFormat::channels_last:
      return "torch.channels_last";
    case MemoryFormat::preserve:
      return "torch.preserve_format";
  }
  return "";
}

std::string to_string(const TensorProperties& properties) {
  std::string text = fmt::format("{}, {}", dtype_name(properties.dtype), properties.layout);
  if (properties.requires_grad) text += ", requires_grad";
  if (properties.memory_format != MemoryFormat::contiguous) {
    text += fmt::format(", {}", memory_format_name(properties.memory_format));
  }
  if (properties.pin_memory) text += ", pin_memory";
  return text;
}

}  // namespace tessera
