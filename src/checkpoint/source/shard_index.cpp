#include "checkpoint/source/shard_index.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "checkpoint/source/source.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/checkpoint/internal/checkpoint_files.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;

std::optional<fs::path> checkpoint_directory(const fs::path& path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) return path;
  if (!index_kind(path.filename().string())) return std::nullopt;
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

std::optional<SourceKind> index_kind(std::string_view name) {
  constexpr std::string_view kSuffix = ".index.json";
  if (!name.ends_with(kSuffix)) return std::nullopt;
  name.remove_suffix(kSuffix.size());
  if (name.ends_with(kSafetensorsSuffix)) return SourceKind::safetensors;
  return has_torch_ending(name) ? std::optional(SourceKind::torch) : std::nullopt;
}

std::optional<std::string> find_index(const std::vector<std::string>& names, SourceKind kind,
                                      std::string_view preferred, const std::string& directory) {
  std::vector<std::string> found;
  for (const std::string& name : names) {
    if (name == preferred) return name;
    if (index_kind(name) == kind) found.push_back(name);
  }
  if (found.empty()) return std::nullopt;
  if (found.size() > 1) {
    fail(ErrorCode::invalid_argument, "{}: found {} indices, '{}' and '{}' among them, expected one; pass one of them",
         directory, found.size(), printable(found[0]), printable(found[1]));
  }
  return found[0];
}

namespace {

// "<stem>-<number>-of-<count><ending>", and "shard-<rank>-" before it if it is of a rank.
struct NumberedShard {
  bool is_of_rank = false;
  std::string stem, count, ending;
  bool operator<(const NumberedShard& other) const {
    return std::tie(is_of_rank, stem, count, ending) <
           std::tie(other.is_of_rank, other.stem, other.count, other.ending);
  }
  std::string name(std::string_view number) const { return fmt::format("{}-{}-of-{}{}", stem, number, count, ending); }
};

// Returns the digits at the end of `text`, and removes them.
std::string take_digits(std::string_view& text) {
  const std::size_t begin = text.find_last_not_of("0123456789") + 1;
  std::string digits(text.substr(begin));
  text.remove_suffix(digits.size());
  return digits;
}

std::optional<std::pair<NumberedShard, std::string>> parse_numbered_shard(std::string_view text) {
  NumberedShard shard;
  shard.ending = checkpoint_file_ending(text);
  if (shard.ending.empty()) return std::nullopt;
  text.remove_suffix(shard.ending.size());
  shard.count = take_digits(text);
  constexpr std::string_view kOf = "-of-", kRank = "shard-";
  if (shard.count.empty() || !text.ends_with(kOf)) return std::nullopt;
  text.remove_suffix(kOf.size());
  std::string number = take_digits(text);
  if (number.empty() || !text.ends_with('-')) return std::nullopt;
  text.remove_suffix(1);
  if (text.starts_with(kRank)) {
    const std::size_t end = text.find_first_not_of("0123456789", kRank.size());
    shard.is_of_rank = end != std::string_view::npos && end > kRank.size() && text[end] == '-';
    if (shard.is_of_rank) text.remove_prefix(end + 1);
  }
  shard.stem = text;
  return std::pair(std::move(shard), std::move(number));
}

}  // namespace

MissingShards missing_shards(const std::vector<std::string>& names) {
  constexpr std::uint64_t kListed = 100;
  std::map<NumberedShard, std::set<std::string>> sets;  // their numbers
  for (const std::string& name : names) {
    if (auto shard = parse_numbered_shard(name)) sets[std::move(shard->first)].insert(std::move(shard->second));
  }
  MissingShards missing;
  for (const auto& [shard, numbers] : sets) {
    std::uint64_t count = 0;
    const auto parsed = std::from_chars(shard.count.data(), shard.count.data() + shard.count.size(), count);
    if (parsed.ec != std::errc()) continue;  // no number of files
    std::set<std::string>& of_set = shard.is_of_rank ? missing.lost_or_never_written : missing.lost;
    const std::uint64_t first = numbers.begin()->find_first_not_of('0') == std::string::npos ? 0 : 1;
    for (std::uint64_t i = 0; i < std::min<std::uint64_t>(count, numbers.size() + kListed); ++i) {
      const std::string number = fmt::format("{:0{}}", first + i, numbers.begin()->size());
      if (!numbers.contains(number)) of_set.insert(shard.name(number));
    }
  }
  return missing;
}

ShardIndex::ShardIndex(SourceBackend& source, std::string name) : source_(source), name_(std::move(name)) {
  source_.description_files.push_back(name_);
  const std::shared_ptr<const ByteSource> opened = source_.open_name(name_);
  require_size_within(*opened, safetensors::kMaxHeaderBytes);
  index_ = safetensors::read_index(read_all(*opened), opened->name());
  MissingFiles::NamesOfFile missing;
  for (const auto& [tensor, file] : index_.weight_map) {
    files_.insert(file);
    if (!has_file(file)) missing[file].push_back(tensor);
  }
  if (!missing.empty()) throw MissingFiles(source_.storage->name_of(name_), std::move(missing));
}

// Names that leave the directory are refused later.
bool ShardIndex::has_file(const std::string& name) const {
  return name.empty() || name.find('\0') != std::string::npos || fs::path(name).is_absolute() ||
         source_.storage->size_bytes(name).has_value();
}

void ShardIndex::check() const {
  std::unordered_map<std::string_view, const TensorInfo*, TextHash> tensors;
  for (const TensorInfo& tensor : source_.tensors) tensors.emplace(tensor.name, &tensor);
  const std::string name = source_.storage->name_of(name_);
  for (const auto& entry : index_.weight_map) {
    const std::string& file = entry.second;
    const auto found = tensors.find(entry.first);
    const bool there = found != tensors.end() && std::ranges::any_of(found->second->stored, [&](const auto& range) {
                         return source_.files[range.file].name == file;
                       });
    if (!there) {
      fail(ErrorCode::corrupt, "{}: it lists '{}' in {}, which does not have it, expected the tensor there", name,
           printable(entry.first), printable(file));
    }
  }
  for (const TensorInfo& tensor : source_.tensors) {
    if (!index_.weight_map.contains(tensor.name)) {
      fail(ErrorCode::corrupt, "{}: it does not list '{}', which is in {}, expected all tensors of its files", name,
           printable(tensor.name), printable(source_.files[tensor.stored[0].file].name));
    }
  }
}

}  // namespace tessera::checkpoint
