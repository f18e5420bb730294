#pragma once
// What safetensors has no place for, carried as JSON text under keys of our own in `__metadata__`, which other readers
// ignore. See docs/formats/safetensors.md.

#include <string_view>

namespace tessera::checkpoint::safetensors_extra {

// {object name: lossless JSON of its value}
inline constexpr std::string_view kObjects = "tessera.objects";
// {tensor or object name: [path item, ...]}: its place in the nested state dict
inline constexpr std::string_view kPaths = "tessera.paths";
// {tensor name: PyTorch's dtype}: of a tensor that is stored as another type. Complex numbers are stored as pairs of
// reals in one more dimension, others as unsigned integers of their size.
inline constexpr std::string_view kDTypes = "tessera.dtypes";

}  // namespace tessera::checkpoint::safetensors_extra
