#pragma once
// Checkpoints and maps for tests.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "support/temporary_directory.h"
#include "tessera/base/file.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/tensor_map.h"
#include "tessera/format/safetensors.h"
#include "tessera/layout/box.h"

namespace tessera::checkpoint::tensor_maps {

struct NamedTensor {
  std::string name;
  std::vector<std::int64_t> shape;
};

// Writes a file of float32 tensors whose elements count from 1000 times their number, and opens it.
inline std::shared_ptr<const Checkpoint> counting_tensors(const ::tessera::testing::TemporaryDirectory& folder,
                                                          const std::vector<NamedTensor>& tensors) {
  std::vector<safetensors::Tensor> entries;
  Bytes data;
  float first = 0;
  for (const NamedTensor& tensor : tensors) {
    safetensors::Tensor& entry = entries.emplace_back();
    entry.name = tensor.name;
    entry.dtype = DType::float32;
    entry.shape = tensor.shape;
    entry.begin_bytes = data.size();
    const std::int64_t count = volume(Box::full(tensor.shape));
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = first + static_cast<float>(i);
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(&value);
      data.insert(data.end(), bytes, bytes + sizeof value);
    }
    entry.end_bytes = data.size();
    first += 1000;
  }
  Bytes file = safetensors::write_header(entries, {});
  file.insert(file.end(), data.begin(), data.end());
  const auto path = folder / "counting.safetensors";
  std::filesystem::remove(path);
  write_new_file(path, file);
  return Checkpoint::open(path);
}

// A map of these rules, which leaves other names as they are.
inline TensorMap map_of_rules(const std::string& rules, const TensorMap::Parameters& set = {},
                              const std::string& parameters = "{}") {
  return TensorMap::parse(
      R"({"tessera_map": 1, "unmatched": "keep", "parameters": )" + parameters + R"(, "rules": [)" + rules + "]}", "m",
      set);
}

}  // namespace tessera::checkpoint::tensor_maps
