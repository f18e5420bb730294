#pragma once
/// \file
/// Inputs of fuzz targets as small checkpoints.

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "tessera/base/bytes.h"

namespace tessera::fuzz {

/// The size of the data of torch.save archives.
constexpr std::size_t kDataBytes = 4096;

/// A folder of this process, empty again for each input.
class Folder {
 public:
  Folder() {
    std::filesystem::create_directories(path_);
    clear();
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  void clear() {
    for (const auto& entry : std::filesystem::directory_iterator(path_)) std::filesystem::remove_all(entry.path());
  }
  std::filesystem::path operator/(const char* name) const { return path_ / name; }
  std::int64_t size_bytes() const {
    std::int64_t size = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path_)) {
      if (entry.is_regular_file()) size += static_cast<std::int64_t>(entry.file_size());
    }
    return size;
  }

 private:
  std::filesystem::path path_ = std::filesystem::temp_directory_path() / ("tessera-fuzz-" + std::to_string(::getpid()));
};

/// Writes the input as a checkpoint and returns its path. `kind` chooses what the input is: the `.metadata` of a DCP
/// checkpoint, the `data.pkl` of a torch.save archive (both with some KiB of data beside them), a safetensors file, or
/// of a torch_checkpointing directory `metadata.pkl` or the `data.pkl` of a rank's file.
std::filesystem::path written(const Folder& folder, std::uint8_t kind, ByteView input);

}  // namespace tessera::fuzz
