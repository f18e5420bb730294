// Locates the tensors of a sharded model by file or by box: model.safetensors.index.json, and the metadata of
// PyTorch's HuggingFace writer.

#include <fmt/ranges.h>

#include <cmath>
#include <unordered_map>

#include "format/json/events.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/format/safetensors.h"

namespace tessera::safetensors {
namespace {

using json::Cursor;
using json::Scalar;

constexpr const char* kShardingInfo = "DCP_SHARDING_INFO";
constexpr const char* kVersion = "DCP_VERSION";
constexpr std::string_view kVersionValue = "1.0";
constexpr std::string_view kSavedOffsets = "saved_offsets";

class IndexVisitor final : public json::Visitor {
 public:
  Index index;
  bool has_weight_map = false;

  void open(const Cursor& at, bool is_array) override {
    const auto path = at.path();
    if (path.empty() && is_array) at.corrupt("{}, expected an object", json::container_name(is_array));
    if (path.size() == 1 && (path[0].key == "weight_map" || path[0].key == "metadata")) {
      if (is_array) at.corrupt("{} is an array, expected an object", path[0].key);
      if (path[0].key == "weight_map") has_weight_map = true;
    } else if (path.size() == 2 && path[0].key == "weight_map") {
      at.corrupt("the file of '{}' is {}, expected a string", printable(path[1].key), json::container_name(is_array));
    } else if (path.size() == 2 && path[0].key == "metadata" && path[1].key == "total_size") {
      at.corrupt("total_size is {}, expected a number of bytes", json::container_name(is_array));
    }
  }

  void scalar(const Cursor& at, Scalar value) override {
    const auto path = at.path();
    if (path.empty()) at.corrupt("{}, expected an object", scalar_kind_name(value.kind));
    if (path.size() == 1 && path[0].key == "weight_map")
      at.corrupt("weight_map is {}, expected an object", scalar_kind_name(value.kind));
    if (path.size() != 2) return;
    if (path[0].key == "weight_map") {
      if (!value.is(Scalar::Kind::string)) {
        at.corrupt("the file of '{}' is {}, expected a string", printable(path[1].key), scalar_kind_name(value.kind));
      }
      if (!is_plain_name(value.text)) {
        at.corrupt("the file of '{}' is '{}', expected a file name without folders", printable(path[1].key),
                   printable(value.text));
      }
      index.weight_map.emplace(path[1].key, std::move(value.text));
    } else if (path[0].key == "metadata" && path[1].key == "total_size") {
      index.total_size = total_size(at, value);
    } else if (path[0].key == "metadata" && value.is(Scalar::Kind::string)) {
      index.metadata.emplace(path[1].key, std::move(value.text));
    }
  }

  void close(const Cursor&, bool) override {}

 private:
  static bool is_plain_name(std::string_view name) {
    return !name.empty() && name != "." && name != ".." && name.find_first_of("/\\") == name.npos &&
           name.find('\0') == name.npos;
  }

  // Some writers sum bytes as Python floats.
  static std::uint64_t total_size(const Cursor& at, const Scalar& value) {
    if (value.is(Scalar::Kind::unsigned_integer)) return value.number;
    if (!value.is(Scalar::Kind::floating) || value.real < 0 || value.real > 0x1p53 ||
        value.real != std::floor(value.real)) {
      at.corrupt("total_size is {}, expected a number of bytes", scalar_kind_name(value.kind));
    }
    return static_cast<std::uint64_t>(value.real);
  }
};

class OffsetsVisitor final : public json::Visitor {
 public:
  explicit OffsetsVisitor(const Header& header) {
    for (const Tensor& tensor : header.tensors) ranks_.emplace(tensor.name, tensor.shape.size());
  }

  std::map<std::string, std::vector<std::int64_t>> take() { return std::move(offsets_); }

  void open(const Cursor& at, bool is_array) override {
    const auto path = at.path();
    const bool is_list = path.size() == 2 && path[1].key == kSavedOffsets;
    if (path.size() <= 1 || is_list) {
      if (is_array != is_list)
        at.corrupt("{}, expected {}", json::container_name(is_array), json::container_name(is_list));
    } else if (in_list(path)) {
      at.corrupt("{} of '{}' has {}, expected integers from 0 to 2^63 - 1", kSavedOffsets, printable(path[0].key),
                 json::container_name(is_array));
    }
    if (is_list) offsets_[path[0].key];
  }

  void scalar(const Cursor& at, Scalar value) override {
    const auto path = at.path();
    if (path.size() <= 1 || (path.size() == 2 && path[1].key == kSavedOffsets)) {
      at.corrupt("{}, expected an object or an array", scalar_kind_name(value.kind));
    }
    if (!in_list(path)) return;
    if (!value.is(Scalar::Kind::unsigned_integer) || !std::in_range<std::int64_t>(value.number)) {
      at.corrupt("{} of '{}' has {}, expected integers from 0 to 2^63 - 1", kSavedOffsets, printable(path[0].key),
                 scalar_kind_name(value.kind));
    }
    offsets_[path[0].key].push_back(static_cast<std::int64_t>(value.number));
  }

  void close(const Cursor& at, bool) override {
    if (at.path().size() != 1) return;
    const std::string& name = at.path()[0].key;
    const auto rank = ranks_.find(name);
    if (rank == ranks_.end())
      at.corrupt("tensor '{}' is not in this file, expected one of its {} tensors", printable(name), ranks_.size());
    const auto found = offsets_.find(name);
    if (found == offsets_.end())
      at.corrupt("tensor '{}' has no {}, expected a list of {} numbers", printable(name), kSavedOffsets, rank->second);
    if (found->second.size() != rank->second) {
      at.corrupt("tensor '{}' has {} dimensions and {} {}, expected one for each dimension", printable(name),
                 rank->second, found->second.size(), kSavedOffsets);
    }
  }

 private:
  static bool in_list(std::span<const json::Level> path) { return path.size() == 3 && path[1].key == kSavedOffsets; }

  std::unordered_map<std::string_view, std::size_t, TextHash> ranks_;
  std::map<std::string, std::vector<std::int64_t>> offsets_;
};

}  // namespace

Index read_index(ByteView json, const std::string& name) {
  IndexVisitor visitor;
  json::read(json, name, 0, visitor);
  if (!visitor.has_weight_map) fail(ErrorCode::corrupt, "{}: JSON without weight_map, expected one", name);
  return std::move(visitor.index);
}

Bytes write_index(const Index& index) {
  std::string json = "{\n  \"metadata\": {";
  std::string_view separator = "\n";
  for (const auto& [key, value] : index.metadata) {
    json += fmt::format("{}    {}: {}", separator, json::quote(key, "index: key"), json::quote(value, "index: value"));
    separator = ",\n";
  }
  if (index.total_size) json += fmt::format("{}    \"total_size\": {}", separator, *index.total_size);
  json += "\n  },\n  \"weight_map\": {";
  separator = "\n";
  for (const auto& [tensor, file] : index.weight_map) {
    json += fmt::format("{}    {}: {}", separator, json::quote(tensor, "index: tensor name"),
                        json::quote(file, "index: file name"));
    separator = ",\n";
  }
  json += "\n  }\n}\n";
  const ByteView bytes = as_bytes(json);
  return {bytes.begin(), bytes.end()};
}

std::optional<std::map<std::string, std::vector<std::int64_t>>> dcp_saved_offsets(const Header& header,
                                                                                  const std::string& name) {
  const auto info = header.metadata.find(kShardingInfo);
  if (info == header.metadata.end()) return std::nullopt;
  if (const auto version = header.metadata.find(kVersion);
      version != header.metadata.end() && version->second != kVersionValue) {
    fail(ErrorCode::unsupported, "{}: {} '{}', expected '{}'", name, kVersion, printable(version->second),
         kVersionValue);
  }
  OffsetsVisitor visitor(header);
  json::read(as_bytes(info->second), fmt::format("{}: {}", name, kShardingInfo), 0, visitor);
  return visitor.take();
}

std::map<std::string, std::string> dcp_metadata(const std::map<std::string, std::vector<std::int64_t>>& saved_offsets) {
  std::string info = "{";
  for (const auto& [name, offsets] : saved_offsets) {
    if (info.size() > 1) info += ", ";
    info += fmt::format("{}: {{\"{}\": [{}]}}", json::quote(name, "safetensors: tensor name", true), kSavedOffsets,
                        fmt::join(offsets, ", "));
  }
  return {{kShardingInfo, info + "}"}, {kVersion, std::string(kVersionValue)}, {"format", "pt"}};
}

}  // namespace tessera::safetensors
