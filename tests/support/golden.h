#pragma once
// The golden checkpoints, written by real PyTorch, and their manifests. Those named `tc` are of torch_checkpointing.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/paths.h"
#include "tessera/base/crc32.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/tensor_reader.h"

namespace tessera::testing {

inline std::filesystem::path golden_directory() {
  return std::filesystem::path(tessera::testing::source_dir()) / "tests" / "golden";
}

struct GoldenTensor {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::uint32_t crc32 = 0;
  bool operator==(const GoldenTensor&) const = default;
};
inline std::ostream& operator<<(std::ostream& out, const GoldenTensor& tensor) {
  return out << tensor.dtype << " " << shape_to_string(tensor.shape) << " crc " << tensor.crc32;
}

struct Golden {
  std::filesystem::path checkpoint;
  std::map<std::string, GoldenTensor> tensors;
  std::map<std::string, std::string> plain;  // Python's repr of the objects
};

inline Golden read_golden(const std::string& name) {
  Golden golden;
  const std::filesystem::path folder = golden_directory() / "checkpoints" / name;
  golden.checkpoint = folder / "ck";
  std::ifstream in(folder / "manifest.json");
  const nlohmann::json json = nlohmann::json::parse(in);
  for (const auto& [tensor, facts] : json.at("tensors").items()) {
    golden.tensors[tensor] = {facts.at("dtype"), facts.at("shape").get<std::vector<std::int64_t>>(), facts.at("crc32")};
  }
  if (json.contains("plain")) {
    for (const auto& [object, text] : json.at("plain").items()) golden.plain[object] = text;
  }
  return golden;
}

inline std::vector<std::string> golden_names() {
  return {"1.13-sharded",  "2.6-dtensor",  "2.6-optim",       "2.6-sharded",  "2.14-dtensor",
          "2.14-hf",       "2.14-optim",   "2.14-replicated", "2.14-sharded", "2.6-tc-local",
          "2.14-tc-files", "2.14-tc-fsdp", "2.14-tc-local",   "2.14-tc-mesh", "2.14-tc-one"};
}

// Returns a name for parameterized tests.
inline std::string test_name(const std::string& golden) {
  std::string name = "PyTorch" + golden;
  for (char& c : name) {
    if (c == '.' || c == '-') c = '_';
  }
  return name;
}

// Reads every tensor of a checkpoint in full.
inline std::map<std::string, GoldenTensor> read_tensors(const std::shared_ptr<const checkpoint::Checkpoint>& source) {
  std::map<std::string, GoldenTensor> tensors;
  for (std::size_t i = 0; i < source->tensors().size(); ++i) {
    const checkpoint::TensorInfo& info = source->tensors()[i];
    source->check_partition(i);
    const checkpoint::TensorReader reader(source, i);
    Bytes bytes(info.size_bytes());
    reader.read(Box::full(info.shape), bytes);
    reader.verify_checksums();
    tensors[info.name] = {std::string(dtype_name(info.dtype)), info.shape, crc32(bytes)};
  }
  return tensors;
}

}  // namespace tessera::testing
