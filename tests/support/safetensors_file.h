#pragma once
// Makes safetensors files for tests.

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "support/temporary_directory.h"
#include "tessera/base/bytes.h"
#include "tessera/format/safetensors.h"

namespace tessera::testing {

struct SafetensorsFile {
  std::vector<safetensors::Tensor> tensors;
  Bytes elements;

  template <typename T>
  void add(const std::string& name, DType dtype, std::vector<std::int64_t> shape, const std::vector<T>& values) {
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(values.data());
    safetensors::Tensor tensor;
    tensor.name = name;
    tensor.dtype = dtype;
    tensor.shape = std::move(shape);
    tensor.begin_bytes = elements.size();
    elements.insert(elements.end(), bytes, bytes + values.size() * sizeof(T));
    tensor.end_bytes = elements.size();
    tensors.push_back(std::move(tensor));
  }

  void write(const std::filesystem::path& path) const {
    Bytes bytes = safetensors::write_header(tensors, {});
    append(bytes, elements);
    overwrite_file(path, bytes);
  }
};

}  // namespace tessera::testing
