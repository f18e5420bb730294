// Type codes, file names, and writing a header.

#include "tessera/format/safetensors.h"

#include <fmt/ranges.h>

#include <array>
#include <unordered_set>
#include <utility>

#include "format/json/events.h"
#include "tessera/base/checked.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/text_hash.h"

namespace tessera::safetensors {
namespace {

// The types of safetensors 0.8 that PyTorch has (all but F6_E2M3 and F6_E3M2).
constexpr std::array<std::pair<DType, std::string_view>, 20> kTypeCodes = {{
    {DType::bool_, "BOOL"},
    {DType::float4_e2m1fn_x2, "F4"},
    {DType::uint8, "U8"},
    {DType::int8, "I8"},
    {DType::float8_e5m2, "F8_E5M2"},
    {DType::float8_e4m3fn, "F8_E4M3"},
    {DType::float8_e8m0fnu, "F8_E8M0"},
    {DType::float8_e4m3fnuz, "F8_E4M3FNUZ"},
    {DType::float8_e5m2fnuz, "F8_E5M2FNUZ"},
    {DType::int16, "I16"},
    {DType::uint16, "U16"},
    {DType::float16, "F16"},
    {DType::bfloat16, "BF16"},
    {DType::int32, "I32"},
    {DType::uint32, "U32"},
    {DType::float32, "F32"},
    {DType::complex64, "C64"},
    {DType::float64, "F64"},
    {DType::int64, "I64"},
    {DType::uint64, "U64"},
}};

std::string tensor_json(const Tensor& tensor) {
  const std::optional<std::string_view> code = type_code(tensor.dtype);
  if (!code) {
    fail(ErrorCode::unsupported,
         "safetensors: tensor '{}': dtype {} has no safetensors type, expected a dtype that has one, such as float32",
         printable(tensor.name), dtype_name(tensor.dtype));
  }
  std::vector<std::int64_t> shape = tensor.shape;
  if (tensor.dtype == DType::float4_e2m1fn_x2) {
    if (shape.empty())
      fail(ErrorCode::unsupported, "safetensors: tensor '{}': F4 scalar, expected at least one dimension",
           printable(tensor.name));
    shape.back() = checked_multiply<std::int64_t>(shape.back(), 2, "safetensors: last dimension of an F4 tensor");
  }
  return fmt::format(R"({{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", *code, fmt::join(shape, ","),
                     tensor.begin_bytes, tensor.end_bytes);
}

void check_ranges(const std::vector<Tensor>& tensors) {
  std::unordered_set<std::string_view, TextHash> names;
  std::uint64_t end = 0;
  for (const Tensor& tensor : tensors) {
    if (tensor.name == kMetadataKey || !names.insert(tensor.name).second) {
      fail(ErrorCode::invalid_argument, "safetensors: duplicate tensor name '{}', expected unique names other than {}",
           printable(tensor.name), kMetadataKey);
    }
    const std::int64_t bytes = checked_multiply(checked_numel(tensor.shape, "safetensors: shape of a tensor"),
                                                dtype_size(tensor.dtype), "safetensors: size of a tensor");
    if (tensor.begin_bytes != end ||
        tensor.end_bytes != checked_add(end, static_cast<std::uint64_t>(bytes), "safetensors: size of the data")) {
      fail(ErrorCode::invalid_argument, "safetensors: tensor '{}' at bytes [{}, {}), expected {} bytes from {}",
           printable(tensor.name), tensor.begin_bytes, tensor.end_bytes, bytes, end);
    }
    end = tensor.end_bytes;
  }
}

}  // namespace

std::optional<std::string_view> type_code(DType dtype) {
  for (const auto& [known, code] : kTypeCodes) {
    if (known == dtype) return code;
  }
  return std::nullopt;
}

std::optional<DType> dtype_of_type_code(std::string_view code) {
  for (const auto& [dtype, known] : kTypeCodes) {
    if (known == code) return dtype;
  }
  return std::nullopt;
}

Bytes write_header(const std::vector<Tensor>& tensors, const std::map<std::string, std::string>& metadata) {
  check_ranges(tensors);
  std::string json = "{";
  if (!metadata.empty()) {
    json += json::quote(kMetadataKey, "") + ":{";
    for (const auto& [key, value] : metadata) {
      if (json.back() != '{') json += ',';
      json += json::quote(key, "safetensors: metadata key") + ":" + json::quote(value, "safetensors: metadata value");
    }
    json += '}';
  }
  for (const Tensor& tensor : tensors) {
    if (json.size() > 1) json += ',';
    json += json::quote(tensor.name, "safetensors: tensor name") + ":" + tensor_json(tensor);
  }
  json += '}';
  json.append((8 - json.size() % 8) % 8, ' ');
  if (json.size() > kMaxHeaderBytes) {
    fail(ErrorCode::invalid_argument, "safetensors: a header of {} bytes, expected at most {}", json.size(),
         kMaxHeaderBytes);
  }
  Bytes out;
  out.reserve(8 + json.size());
  append_little_endian<std::uint64_t>(out, json.size());
  append(out, json);
  return out;
}

std::string shard_file_name(std::size_t index, std::size_t count) {
  if (count == 1) return "model.safetensors";
  return fmt::format("model-{:05}-of-{:05}.safetensors", index + 1, count);
}

std::string rank_shard_file_name(std::size_t rank, std::size_t index, std::size_t count) {
  return fmt::format("shard-{:05}-model-{:05}-of-{:05}.safetensors", rank + 1, index + 1, count);
}

}  // namespace tessera::safetensors
