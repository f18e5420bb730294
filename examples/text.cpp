#include "text.h"

#include <torch/types.h>

#include <algorithm>
#include <map>
#include <random>

#include "tessera/base/error.h"
#include "tessera/base/file.h"

namespace tessera::examples {

namespace fs = std::filesystem;

namespace {

std::vector<fs::path> files_of(const fs::path& path) {
  if (!fs::is_directory(path)) return {path};
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(path)) {
    if (entry.is_regular_file() && !entry.is_symlink()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

bool is_blank(char byte) { return byte == ' ' || byte == '\t' || byte == '\f' || byte == '\r'; }

void append_text(std::string& out, std::string_view text) {
  for (const char byte : text) {
    if (!is_blank(byte)) out += byte;
    if (is_blank(byte) && !out.empty() && out.back() != ' ') out += ' ';
  }
}

// A byte 10xxxxxx continues the previous character.
bool begins_character(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> characters;
  characters.reserve(text.size());
  for (std::size_t begin = 0, end = 0; begin < text.size(); begin = end) {
    end = begin + 1;
    while (end < text.size() && !begins_character(text[end])) ++end;
    characters.push_back(text.substr(begin, end - begin));
  }
  return characters;
}

}  // namespace

std::string read_text(const std::vector<fs::path>& paths) {
  std::string text;
  for (const fs::path& path : paths) {
    for (const fs::path& file : files_of(path)) append_text(text, as_text(read_file(file)));
  }
  return text;
}

Text::Text(std::string_view text) {
  const std::vector<std::string_view> all = split(text);
  if (all.empty()) fail(ErrorCode::invalid_argument, "read the text: found no characters, expected at least 1");
  std::map<std::string_view, std::int32_t> numbers;
  for (const std::string_view character : all) numbers.emplace(character, 0);
  for (auto& [character, number] : numbers) {
    number = static_cast<std::int32_t>(characters_.size());
    characters_.emplace_back(character);
  }
  tokens_ = torch::empty({static_cast<std::int64_t>(all.size())}, torch::kInt);
  std::transform(all.begin(), all.end(), tokens_.data_ptr<std::int32_t>(),
                 [&](std::string_view character) { return numbers.at(character); });
}

std::string Text::vocabulary() const {
  std::string all;
  for (const std::string& character : characters_) all += character;
  return all;
}

at::Tensor Text::rows(std::int64_t step, std::int64_t batch, std::int64_t length, std::int64_t part,
                      std::int64_t parts) const {
  if (tokens_.numel() < length) {
    fail(ErrorCode::invalid_argument,
         "rows of the text: it has {} characters, expected at least {} (the context plus one)", tokens_.numel(),
         length);
  }
  const auto places = static_cast<std::uint64_t>(tokens_.numel() - length + 1);
  std::mt19937_64 random(static_cast<std::uint64_t>(step));
  std::vector<at::Tensor> rows;
  for (std::int64_t row = 0; row < batch; ++row) {
    const auto begin = static_cast<std::int64_t>(random() % places);
    if (row % parts == part) rows.push_back(tokens_.slice(0, begin, begin + length));
  }
  return rows.empty() ? torch::empty({0, length}, torch::kLong) : torch::stack(rows).to(torch::kLong);
}

}  // namespace tessera::examples
