#pragma once
// What safetensors has no place for, carried as JSON text under keys of our own in `__metadata__`, which other readers
// ignore. See docs/formats/safetensors.md.

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/format/dcp_metadata.h"
#include "tessera/format/safetensors.h"

namespace tessera::checkpoint::safetensors_extra {

// {object name: lossless JSON of its value}
inline constexpr std::string_view kObjects = "tessera.objects";
// {tensor or object name: [path item, ...]}: its place in the nested state dict
inline constexpr std::string_view kPaths = "tessera.paths";
// {tensor name: PyTorch's dtype}: of a tensor that is stored as another type. Complex numbers are stored as pairs of
// reals in one more dimension, others as unsigned integers of their size.
inline constexpr std::string_view kDTypes = "tessera.dtypes";

// How a tensor is stored.
struct StoredAs {
  DType dtype;
  bool as_pairs = false;  // of reals, in one more dimension
};
StoredAs stored_as(DType dtype, const std::vector<std::int64_t>& shape);

using Json = nlohmann::ordered_json;

// Leaves out a path that is the name.
void add_path(Json& paths, const std::string& name, const Path& path);

// Nothing if `json` is empty. Throws Error(unsupported) if it isn't UTF-8.
void add_extra(std::map<std::string, std::string>& metadata, std::string_view key, const Json& json);

// Whether `a` goes before `b` in a file: larger elements first, so that every tensor is aligned to its elements; by
// name where equal. As the reference implementation.
bool goes_before(const safetensors::Tensor& a, const safetensors::Tensor& b);

}  // namespace tessera::checkpoint::safetensors_extra
