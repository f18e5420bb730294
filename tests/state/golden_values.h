#pragma once
// Reads the files of tests/golden/state and decodes the values that encode.py writes.

#include <ATen/ATen.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "support/paths.h"
#include "tessera/base/file.h"
#include "tessera/state/traverse.h"
#include "tessera/state/value.h"
#include "tessera/tensor/torch_types.h"

namespace tessera::testing {

inline std::filesystem::path state_golden(const std::string& name) {
  return std::filesystem::path(tessera::testing::source_dir()) / "tests" / "golden" / "state" / name;
}

inline nlohmann::json read_state_json(const std::string& name) {
  std::ifstream in(state_golden(name));
  return nlohmann::json::parse(in);
}

inline Key decode_key(const nlohmann::json& json) {
  return json.is_string() ? Key(json.get<std::string>()) : Key(json.get<std::int64_t>());
}

inline Path decode_path(const nlohmann::json& json) {
  Path path;
  for (const nlohmann::json& part : json) path.push_back(decode_key(part));
  return path;
}

inline Bytes latin1(const std::string& utf8) {
  Bytes bytes;
  for (std::size_t i = 0; i < utf8.size(); ++i) {
    const auto byte = static_cast<unsigned char>(utf8[i]);
    if (byte < 0x80) {
      bytes.push_back(byte);
    } else {
      bytes.push_back(static_cast<std::uint8_t>((byte << 6) | (static_cast<unsigned char>(utf8[++i]) & 0x3f)));
    }
  }
  return bytes;
}

inline Value decode(const nlohmann::json& json) {
  if (json.is_null()) return {};
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_integer()) return json.get<std::int64_t>();
  if (json.is_string()) return json.get<std::string>();
  const std::string kind = json.begin().key();
  const auto& content = json.begin().value();
  if (kind == "float") return std::stod(content.get<std::string>());
  if (kind == "bytes") return latin1(content.get<std::string>());
  if (kind == "dict") {
    Dict dict;
    for (const nlohmann::json& entry : content) dict.insert_or_assign(decode_key(entry[0]), decode(entry[1]));
    return dict;
  }
  if (kind == "tensor") {
    const auto type = to_scalar_type(dtype_from_name(content[0].get<std::string>()));
    const auto elements = content[2].get<std::vector<double>>();
    return at::tensor(elements, at::kDouble).view(content[1].get<std::vector<std::int64_t>>()).to(type);
  }
  std::vector<Value> items;
  for (const nlohmann::json& item : content) items.push_back(decode(item));
  return kind == "list" ? Value(List(std::move(items))) : Value(Tuple(std::move(items)));
}

}  // namespace tessera::testing
