#pragma once
// Archives in memory and golden files, for the tests of reading and of writing.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "support/paths.h"
#include "tessera/base/file.h"
#include "tessera/format/torch_archive.h"

namespace tessera::torch_archive {

inline std::filesystem::path golden_directory() {
  return std::filesystem::path(tessera::testing::source_dir()) / "tests" / "golden" / "torch_archive";
}

inline Archive open_bytes(const Bytes& bytes, const OpenLimits& limits = {}) {
  const MemorySource source(bytes, "mem.pt");
  return open(source, 0, bytes.size(), limits);
}

inline Bytes to_bytes(std::string_view text) { return {as_bytes(text).begin(), as_bytes(text).end()}; }

inline Bytes entry_bytes(const Archive& archive, const Bytes& file, const std::string& name) {
  const zip::Entry* entry = archive.directory.find(archive.prefix + "/" + name);
  EXPECT_NE(entry, nullptr) << name;
  const auto begin = file.begin() + static_cast<std::ptrdiff_t>(entry->data_offset_bytes);
  return {begin, begin + static_cast<std::ptrdiff_t>(entry->size_bytes)};
}

struct Golden {
  Bytes file;
  nlohmann::json expected;
};

inline Golden golden(const std::string& name) {
  std::ifstream in(golden_directory() / (name + ".json"));
  return {read_file(golden_directory() / (name + ".pt")), nlohmann::json::parse(in)};
}

inline constexpr std::string_view kNonePickle = "\x80\x02N.";

inline TensorRef float_tensor(std::vector<std::int64_t> sizes, std::vector<std::int64_t> strides, std::int64_t bytes) {
  TensorRef tensor;
  tensor.storage = {"0", "cpu", DType::float32, bytes};
  tensor.sizes = std::move(sizes);
  tensor.strides = std::move(strides);
  return tensor;
}

}  // namespace tessera::torch_archive
