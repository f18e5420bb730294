#pragma once
// Extensions for data that safetensors cannot represent: JSON under keys of our own in `__metadata__`, which other
// readers ignore. See docs/formats/safetensors.md.

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
// {tensor or object name: [path item, ...]}: the path in the nested state dict
inline constexpr std::string_view kPaths = "tessera.paths";
// {tensor name: PyTorch's dtype} for tensors that are stored as another dtype. Complex numbers are stored as pairs of
// reals in an additional dimension, others as unsigned integers of equal size.
inline constexpr std::string_view kDTypes = "tessera.dtypes";

// Whether a key of `__metadata__` is one of these, or one of PyTorch's DCP.
bool is_reserved(std::string_view key);

// The dtype that a tensor is stored as.
struct StoredAs {
  DType dtype;
  bool as_pairs = false;  // of reals, in an additional dimension
};
StoredAs stored_as(DType dtype, const std::vector<std::int64_t>& shape);

using Json = nlohmann::ordered_json;

// Adds a path, unless it consists of the name only.
void add_path(Json& paths, const std::string& name, const Path& path);

// Adds `json` under `key`, unless it is empty. Throws Error(unsupported) if it is not UTF-8.
void add_extra(std::map<std::string, std::string>& metadata, std::string_view key, const Json& json);

// Returns the JSON object that is under `key` in the `__metadata__` of `file`, or an empty one if there is none. Throws
// Error(corrupt) for another text, and for a key that occurs twice in any object of it.
Json find_extra(const std::map<std::string, std::string>& metadata, std::string_view key, const std::string& file);

// Whether `a` goes before `b` in a file: larger elements first, so that every tensor is aligned to its elements, then
// by name. The reference implementation uses the same order.
bool goes_before(const safetensors::Tensor& a, const safetensors::Tensor& b);

}  // namespace tessera::checkpoint::safetensors_extra
