#include "checkpoint/source/safetensors_extra.h"

#include <nlohmann/json.hpp>
#include <utility>
#include <variant>

#include "tessera/base/error.h"
#include "tessera/format/internal/json_structure.h"

namespace tessera::checkpoint::safetensors_extra {

bool is_reserved(std::string_view key) {
  return key == "DCP_VERSION" || key == "DCP_SHARDING_INFO" || key == kObjects || key == kPaths || key == kDTypes;
}

StoredAs stored_as(DType dtype, const std::vector<std::int64_t>& shape) {
  // float4_e2m1fn_x2 is stored as F4 with a last dimension of twice the size. A scalar has no last dimension.
  const bool is_lone_pair = dtype == DType::float4_e2m1fn_x2 && shape.empty();
  if (safetensors::type_code(dtype) && !is_lone_pair) return {dtype};
  switch (dtype) {
    case DType::complex32:
      return {DType::float16, true};
    case DType::complex64:
      return {DType::float32, true};
    case DType::complex128:
      return {DType::float64, true};
    case DType::bcomplex32:
      return {DType::bfloat16, true};
    default:
      break;
  }
  switch (dtype_size(dtype)) {
    case 1:
      return {DType::uint8};
    case 2:
      return {DType::uint16};
    case 4:
      return {DType::uint32};
    default:
      return {DType::uint64};
  }
}

void add_path(Json& paths, const std::string& name, const Path& path) {
  const bool is_default = path.empty() || (path.size() == 1 && path[0] == Key(name));
  if (is_default) return;
  Json items = Json::array();
  for (const Key& item : path) {
    std::visit([&](const auto& part) { items.push_back(part); }, item);
  }
  json::add_member(paths, name, std::move(items));
}

void add_extra(std::map<std::string, std::string>& metadata, std::string_view key, const Json& json) {
  if (json.empty()) return;
  try {
    metadata[std::string(key)] = json.dump(-1, ' ', false, Json::error_handler_t::strict);
  } catch (const Json::exception&) {
    fail(ErrorCode::unsupported, "safetensors metadata: {}: a name or a string is not valid UTF-8, expected UTF-8",
         key);
  }
}

Json find_extra(const std::map<std::string, std::string>& metadata, std::string_view key, const std::string& file) {
  const auto found = metadata.find(std::string(key));
  if (found == metadata.end()) return Json::object();
  json::OrderedJson parsed = json::parse_ordered(found->second);
  if (!parsed.value.is_object()) {
    fail(ErrorCode::corrupt, "{}: {} in __metadata__ is {}, expected a JSON object", file, key,
         parsed.value.is_discarded() ? "no JSON" : fmt::format("a JSON {}", parsed.value.type_name()));
  }
  if (parsed.structure.duplicate_key) {
    fail(ErrorCode::corrupt, "{}: the key '{}' occurs twice in {} in __metadata__, expected unique keys", file,
         printable(*parsed.structure.duplicate_key), key);
  }
  return std::move(parsed.value);
}

bool goes_before(const safetensors::Tensor& a, const safetensors::Tensor& b) {
  const std::int64_t a_size = dtype_size(a.dtype), b_size = dtype_size(b.dtype);
  return a_size != b_size ? a_size > b_size : a.name < b.name;
}

}  // namespace tessera::checkpoint::safetensors_extra
