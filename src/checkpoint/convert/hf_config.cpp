#include "checkpoint/convert/hf_config.h"

#include <algorithm>
#include <array>
#include <memory>
#include <system_error>

#include "tessera/base/error.h"
#include "tessera/base/file.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;
namespace {

// Globs. No file that a checkpoint consists of matches one.
constexpr std::array<std::string_view, 9> kHfFiles = {kHfConfigFileName,
                                                      "generation_config.json",
                                                      "preprocessor_config.json",
                                                      "added_tokens.json",
                                                      "special_tokens_map.json",
                                                      "merges.txt",
                                                      "tokenizer*",
                                                      "vocab*",
                                                      "chat_template*"};

bool is_hf_file(const std::string& name) {
  return !name.ends_with(".safetensors") &&
         std::ranges::any_of(kHfFiles, [&](std::string_view glob) { return glob_matches(glob, name); });
}

}  // namespace

std::vector<std::string> hf_config_files(const fs::path& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
    std::error_code broken_link;
    const std::string name = entry->path().filename().string();
    if (is_hf_file(name) && entry->is_regular_file(broken_link)) names.push_back(name);
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    fail(ErrorCode::io, "list {}: {}", directory.string(), error.message());
  }
  std::ranges::sort(names);
  if (std::ranges::find(names, kHfConfigFileName) == names.end()) {
    fail(ErrorCode::not_found, "{}: found no {}, expected the directory of a Hugging Face model", directory.string(),
         kHfConfigFileName);
  }
  return names;
}

std::vector<PlannedFile> plan_hf_config(const fs::path& directory) {
  std::vector<PlannedFile> files;
  for (const std::string& name : hf_config_files(directory)) {
    const std::uint64_t size = File::open_read(directory / name).size_bytes();
    PlannedFile& file = files.emplace_back();
    file.name = name;
    file.units.push_back({size, [path = directory / name, size] {
                            const auto opened = std::make_shared<const File>(File::open_read(path));
                            Data data;
                            data.length_bytes = size;
                            data.produce = [opened](std::uint64_t begin_bytes, MutableByteView out) {
                              if (!out.empty()) opened->read_at(begin_bytes, out);
                            };
                            Unit unit;
                            unit.segments.emplace_back(std::move(data));
                            return unit;
                          }});
  }
  return files;
}

}  // namespace tessera::checkpoint
