/// \file
/// Runs every file of the given folders through a fuzz target once, in order of name: the corpus as a test. An input
/// that crashes or throws ends the program; the last line printed names it.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <iostream>
#include <vector>

#include "tessera/base/file.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

std::vector<std::filesystem::path> files_in(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

int replay(const std::vector<std::filesystem::path>& folders) {
  std::size_t count = 0;
  for (const auto& folder : folders) {
    for (const auto& file : files_in(folder)) {
      std::cout << file.string() << std::endl;  // flushed, so that the name is printed if the next line crashes
      const tessera::Bytes bytes = tessera::read_file(file);
      LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
      ++count;
    }
  }
  std::cout << count << " inputs\n";
  return count == 0 ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return replay({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << "replay: " << error.what() << '\n';
    return 1;
  }
}
