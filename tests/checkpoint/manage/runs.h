#pragma once
// Directories of runs for tests.

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "support/paths.h"
#include "support/temporary_directory.h"
#include "support/torch_file.h"
#include "tessera/base/file.h"

namespace tessera::checkpoint::runs {

// A checkpoint that real PyTorch wrote.
inline std::filesystem::path golden_checkpoint(const std::string& name) {
  return std::filesystem::path(::tessera::testing::source_dir()) / "tests/golden/checkpoints" / name / "ck";
}

inline std::filesystem::path golden_safetensors_file() {
  return std::filesystem::path(::tessera::testing::source_dir()) / "tests/golden/safetensors/0.8.0-shapes.safetensors";
}

class RunTest : public ::testing::Test {
 protected:
  const std::filesystem::path& run() const { return directory_.path(); }

  // Adds a complete step of four ranks.
  void add_dcp(const std::string& name) const {
    const std::filesystem::path saved =
        std::filesystem::path(::tessera::testing::source_dir()) / "tests/golden/demo/ck";
    std::filesystem::copy(saved, run() / name, std::filesystem::copy_options::recursive);
  }
  // Adds a file of torch.save.
  void add_torch(const std::filesystem::path& name) const {
    ::tessera::testing::TorchFile file;
    file.storages.emplace_back(8);
    file.add("weight", DType::float32, 0, 0, {2}, {1});
    std::filesystem::create_directories((run() / name).parent_path());
    write_new_file(run() / name, file.bytes());
  }
  void add_text(const std::filesystem::path& name, std::string_view text) const {
    std::filesystem::create_directories((run() / name).parent_path());
    write_new_file(run() / name, as_bytes(text));
  }

 private:
  ::tessera::testing::TemporaryDirectory directory_;
};

}  // namespace tessera::checkpoint::runs
