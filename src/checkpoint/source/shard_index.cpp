#include "checkpoint/source/shard_index.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "checkpoint/source/source.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/internal/checkpoint_files.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;

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
  std::unordered_map<std::string_view, const TensorInfo*> tensors;
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
