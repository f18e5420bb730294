#include "tessera/checkpoint/checkpoint.h"

#include <algorithm>
#include <utility>

#include "checkpoint/source/expansion.h"
#include "checkpoint/source/foreign.h"
#include "checkpoint/source/mapped.h"
#include "checkpoint/source/shard_index.h"
#include "checkpoint/source/source.h"
#include "tessera/base/checked.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/checkpoint/internal/checkpoint_files.h"
#include "tessera/checkpoint/manage/run_directory.h"
#include "tessera/checkpoint/mosaic.h"
#include "tessera/format/safetensors.h"
#include "tessera/format/torch_checkpointing.h"
#include "tessera/layout/coverage.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;

std::string_view source_kind_name(SourceKind kind) {
  switch (kind) {
    case SourceKind::dcp:
      return "dcp";
    case SourceKind::safetensors:
      return "safetensors";
    case SourceKind::torch:
      return "torch";
    case SourceKind::torch_checkpointing:
      return "torch_checkpointing";
  }
  return "unknown";
}

std::uint64_t TensorInfo::size_bytes() const {
  return static_cast<std::uint64_t>(checked_multiply(checked_numel(shape, name), dtype_size(dtype), name));
}

std::shared_ptr<const ByteSource> FileCache::open(std::uint32_t key,
                                                  FunctionRef<std::shared_ptr<const ByteSource>()> open) {
  const std::lock_guard lock(mutex_);
  if (const auto found = files_.find(key); found != files_.end()) return found->second;
  if (order_.size() >= kOpenFiles) {
    files_.erase(order_.front());
    order_.pop_front();
  }
  std::shared_ptr<const ByteSource> file = open();
  files_.emplace(key, file);
  order_.push_back(key);
  return file;
}

std::shared_ptr<const ByteSource> SourceBackend::open_file(std::uint32_t file) const {
  if (file == StoredRange::kNoFile)
    fail(ErrorCode::corrupt, "{}: found no file that is recorded for this data, expected one", path.string());
  if (file >= kPlainItems) return open_plain_item(file - kPlainItems);
  return cache_.open(file, [&] { return open_name(files[file].name); });
}

std::shared_ptr<const ByteSource> SourceBackend::open_plain_item(std::uint32_t number) const {
  fail(ErrorCode::internal, "{}: no item {} with transforms", path.string(), number);
}

void SourceBackend::compare_rest(const Cancellation* cancellation) const {
  checksums.compare_rest([this](const std::string& name) { return storage->open(name); }, cancellation);
}

std::shared_ptr<const ByteSource> SourceBackend::open_name(const std::string& name) const {
  return checksums.compared(name, storage->open(name));
}

std::uint32_t SourceBackend::add_file(const std::string& name) {
  const fs::path relative(name);
  bool leaves = name.empty() || relative.is_absolute() || name.find('\0') != std::string::npos;
  for (const fs::path& part : relative) leaves = leaves || part == "..";
  if (leaves) {
    fail(ErrorCode::corrupt,
         "{}: data file name '{}' leaves the checkpoint's directory, expected a relative path without '..'",
         path.string(), printable(name));
  }
  files.push_back({name, storage->size_bytes(name), rank_of_file(name)});
  return static_cast<std::uint32_t>(files.size() - 1);
}

void SourceBackend::finish() {
  tensor_index.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensor_index.add(tensors[i].name, i)) {
      fail(ErrorCode::corrupt, "{}: the name '{}' occurs twice, expected unique names", path.string(),
           printable(tensors[i].name));
    }
  }
  for (std::size_t i = 0; i < objects.size(); ++i) {
    if (tensor_index.contains(objects[i].name) || !object_index.add(objects[i].name, i)) {
      fail(ErrorCode::corrupt, "{}: the name '{}' occurs twice, expected unique names", path.string(),
           printable(objects[i].name));
    }
  }
  if (objects.size() > 1) {
    repeated_in_objects = std::make_shared<RepeatedInObjects>(objects.size(), stored_bytes(files));
  }
}

namespace {

std::string describe_missing(std::string_view what, const MissingFiles::NamesOfFile& files) {
  const auto& [file, names] = *files.begin();
  std::string text = fmt::format("{}: '{}' is missing", what, printable(file));
  if (!names.empty()) text += fmt::format(", expected it for '{}'", printable(names[0]));
  if (names.size() > 1) text += fmt::format(" and {} more", names.size() - 1);
  if (names.empty()) text += ", expected all files of the checkpoint";
  return files.size() == 1 ? text : text + fmt::format("; so are {} more files", files.size() - 1);
}

}  // namespace

MissingFiles::MissingFiles(std::string_view what, NamesOfFile files)
    : Error(ErrorCode::corrupt, describe_missing(what, files)), files_(std::move(files)) {}

std::optional<Sidecar> sidecar_of(const Storage& storage, const OpenOptions& options) {
  if (!options.check_checksums) return std::nullopt;
  return options.sidecar != nullptr ? std::optional(*options.sidecar) : read_sidecar(storage);
}

std::optional<Sidecar> sidecar_of(const fs::path& file, const OpenOptions& options) {
  if (!options.check_checksums) return std::nullopt;
  return options.sidecar != nullptr ? std::optional(*options.sidecar) : read_sidecar(file);
}

std::optional<SourceKind> directory_kind(const Storage& storage) {
  if (is_dcp(storage)) return SourceKind::dcp;
  const std::vector<std::string> names = storage.list();
  const auto any = [&](const auto& what) { return std::any_of(names.begin(), names.end(), what); };
  const auto is_of = [](const std::string& name, SourceKind kind) { return index_kind(name) == kind; };
  if (any([](const std::string& name) { return name == torch_checkpointing::kMetadataFileName; })) {
    return SourceKind::torch_checkpointing;
  }
  if (any([&](const std::string& name) {
        return name.ends_with(kSafetensorsSuffix) || is_of(name, SourceKind::safetensors);
      })) {
    return SourceKind::safetensors;
  }
  if (any([&](const std::string& name) { return is_of(name, SourceKind::torch); })) return SourceKind::torch;
  if (any(is_torch_checkpointing_file)) return SourceKind::torch_checkpointing;
  if (any([](const std::string& name) { return name.ends_with(".distcp"); })) return SourceKind::dcp;
  return std::nullopt;
}

namespace {

// Returns what to do with a directory that has no checkpoint, but may have some in it.
std::string hint_for_directory(const fs::path& directory, const std::vector<std::string>& names) {
  const auto hint = [](std::string_view name, std::size_t count, std::string_view what) {
    return fmt::format("; it has '{}'{}: pass one of them", printable(name),
                       count == 1 ? "" : fmt::format(" and {} more {}", count - 1, what));
  };
  const std::vector<NamedStep> steps = directory.empty() ? std::vector<NamedStep>() : find_steps(directory);
  if (!steps.empty()) return hint(steps.back().name, steps.size(), "steps") + " ('tessera ls' lists them)";
  const auto is_torch = [](const std::string& name) { return has_torch_ending(name); };
  const auto first = std::ranges::find_if(names, is_torch);
  if (first == names.end()) return "";
  return hint(*first, static_cast<std::size_t>(std::ranges::count_if(names, is_torch)), "files");
}

// `directory` is empty if the storage is not in the file system.
std::unique_ptr<SourceBackend> open_storage(const std::shared_ptr<const Storage>& storage, const fs::path& directory,
                                            const OpenOptions& options) {
  if (options.metadata != nullptr) return open_dcp(storage, options);
  const std::vector<std::string> names = storage->list();
  switch (directory_kind(*storage).value_or(SourceKind::dcp)) {
    case SourceKind::safetensors:
      return open_safetensors_directory(
          storage, options,
          find_index(names, SourceKind::safetensors, safetensors::kIndexFileName, storage->name()).value_or(""));
    case SourceKind::torch:
      return open_torch_directory(
          storage, options, find_index(names, SourceKind::torch, kTorchIndexFileName, storage->name()).value_or(""));
    case SourceKind::torch_checkpointing:
      return open_torch_checkpointing(storage, options);
    case SourceKind::dcp:
      break;
  }
  if (is_dcp(*storage)) return open_dcp(storage, options);
  if (directory_kind(*storage)) {
    fail(ErrorCode::corrupt, "{}: found data files but no .metadata, expected both; the save was never completed",
         storage->name());
  }
  if (!directory.empty()) {
    if (const auto foreign = foreign_directory(directory)) refuse_foreign(directory, *foreign);
  }
  fail(ErrorCode::not_found,
       "{}: no checkpoint in this directory, expected .metadata, metadata.pkl, *.safetensors, *.index.json or "
       "<item>_0.pt{}",
       storage->name(), hint_for_directory(directory, names));
}

// Of a file of an unknown format.
constexpr std::size_t kShownBytes = 16;

// Throws Error(invalid_argument), naming the directory to pass, for a file that is a part of a checkpoint.
void refuse_part(const fs::path& path) {
  const std::string name = path.filename().string();
  const char* what = name == kMetadataFileName || parse_rank_metadata_name(name) ? "metadata"
                     : name.ends_with(".distcp")                                 ? "data"
                                                                                 : nullptr;
  if (what == nullptr) return;
  const fs::path directory = path.has_parent_path() ? path.parent_path() : fs::path(".");
  fail(ErrorCode::invalid_argument, "{}: found a {} file, expected the checkpoint's directory; pass '{}'",
       path.string(), what, printable(directory.string()));
}

// Opens the directory of an index.
std::unique_ptr<SourceBackend> open_index(const fs::path& path, SourceKind kind, const OpenOptions& options) {
  const auto storage = file_system_storage(path.has_parent_path() ? path.parent_path() : fs::path("."));
  return (kind == SourceKind::torch ? open_torch_directory : open_safetensors_directory)(storage, options,
                                                                                         path.filename().string());
}

std::unique_ptr<SourceBackend> open_file_source(const fs::path& path, const OpenOptions& options) {
  refuse_part(path);
  if (const auto kind = index_kind(path.filename().string())) return open_index(path, *kind, options);
  const File file = File::open_read(path);
  const std::uint64_t size = file.size_bytes();
  Bytes first(std::min<std::uint64_t>(size, kForeignBytes));
  file.read_at(0, first);
  if (const auto foreign = foreign_file(first, file)) refuse_foreign(path, *foreign);
  if (zip::looks_like_zip(first)) return open_torch_file(path, options);
  if (torch_archive::looks_like_legacy(first)) {
    fail(ErrorCode::unsupported,
         "{}: found a torch.save file from before PyTorch 1.6, expected one of a later PyTorch; load it and save it "
         "again with a newer PyTorch",
         path.string());
  }
  if (safetensors::looks_like_safetensors(first, size) || path.extension() == ".safetensors") {
    return open_safetensors_file(path, options);
  }
  fail(ErrorCode::corrupt, "{} at byte 0: found {}, expected a torch.save archive or a safetensors file", path.string(),
       size == 0 ? "an empty file" : fmt::format("'{}'", printable(as_text(first), kShownBytes)));
}

}  // namespace

std::shared_ptr<const Checkpoint> Checkpoint::open(const std::shared_ptr<const Storage>& storage,
                                                   const OpenOptions& options) {
  return made(open_storage(storage, {}, options));
}

std::shared_ptr<const Checkpoint> Checkpoint::open(const fs::path& path, const OpenOptions& options) {
  return made(fs::is_directory(require_present(path)) ? open_storage(file_system_storage(path), path, options)
                                                      : open_file_source(path, options));
}

std::shared_ptr<const Checkpoint> Checkpoint::made(std::unique_ptr<SourceBackend> backend) {
  backend->finish();
  return std::shared_ptr<const Checkpoint>(new Checkpoint(std::move(backend)));
}

Checkpoint::Checkpoint(std::unique_ptr<SourceBackend> backend) : backend_(std::move(backend)) {}
Checkpoint::~Checkpoint() = default;

const fs::path& Checkpoint::path() const { return backend_->path; }
SourceKind Checkpoint::kind() const { return backend_->kind; }
const std::string& Checkpoint::version() const { return backend_->version; }
const std::vector<SourceFile>& Checkpoint::files() const { return backend_->files; }
const std::vector<std::string>& Checkpoint::description_files() const { return backend_->description_files; }
const std::vector<TensorInfo>& Checkpoint::tensors() const { return backend_->tensors; }
const std::vector<ObjectInfo>& Checkpoint::objects() const { return backend_->objects; }
const std::vector<StoredCopy>& Checkpoint::copies() const { return backend_->copies; }
const dcp::Metadata* Checkpoint::dcp_metadata() const { return backend_->dcp_metadata(); }
const std::map<std::string, std::string>& Checkpoint::metadata() const { return backend_->metadata; }
const std::vector<std::string>& Checkpoint::warnings() const { return backend_->warnings; }

std::uint64_t Checkpoint::tensor_bytes() const {
  std::uint64_t total = 0;
  for (const TensorInfo& tensor : tensors()) total = checked_add(total, tensor.size_bytes(), "size of all tensors");
  return total;
}

std::optional<std::size_t> Checkpoint::find_tensor(std::string_view name) const {
  return backend_->tensor_index.find(name);
}

std::optional<std::size_t> Checkpoint::find_object(std::string_view name) const {
  return backend_->object_index.find(name);
}

void Checkpoint::check_partition(std::size_t i) const {
  const TensorInfo& tensor = tensors()[i];
  const auto where = [&] { return fmt::format("{}: tensor '{}'", path().string(), printable(tensor.name)); };
  for (std::size_t c = 0; c < tensor.chunks.size(); ++c) {
    if (!is_valid(tensor.chunks[c], tensor.shape)) {
      fail(ErrorCode::corrupt, "{}: chunk {} is outside of the shape {}, expected a box within it", where(),
           to_string(tensor.chunks[c]), shape_to_string(tensor.shape));
    }
  }
  if (const auto pair = find_overlap(tensor.chunks)) {
    fail(ErrorCode::corrupt, "{}: chunks {} and {} overlap, expected disjoint ones", where(),
         to_string(tensor.chunks[pair->first]), to_string(tensor.chunks[pair->second]));
  }
  if (const auto hole = find_hole(tensor.shape, tensor.chunks)) {
    fail(ErrorCode::corrupt, "{}: no chunk holds {} of the shape {}, expected chunks that cover it", where(),
         to_string(*hole), shape_to_string(tensor.shape));
  }
}

Extent Checkpoint::locate(std::size_t tensor, std::size_t chunk) const { return backend_->locate(tensor, chunk); }
StoredRange Checkpoint::without_transforms(const StoredRange& stored) const {
  return backend_->without_transforms(stored);
}
ObjectValue Checkpoint::load_object(std::size_t i, ObjectUse use) const {
  ObjectValue loaded = backend_->load_object(i);
  if (use == ObjectUse::any && backend_->repeated_in_objects) {
    with_context([&] { return fmt::format("{}: object '{}'", path().string(), printable(objects()[i].name)); },
                 [&] { backend_->repeated_in_objects->charge(i, loaded.value); });
  }
  return loaded;
}
std::shared_ptr<const ByteSource> Checkpoint::open_file(std::uint32_t file) const { return backend_->open_file(file); }

bool Checkpoint::is_computed(std::size_t tensor) const {
  return backend_->computed() != nullptr && !backend_->computed()->same_tensor(tensor);
}

bool Checkpoint::has_sidecar() const { return backend_->has_sidecar(); }
std::uint64_t Checkpoint::largest_block_bytes() const { return backend_->largest_block_bytes(); }
std::uint64_t Checkpoint::bytes_not_compared() const { return backend_->bytes_not_compared(); }
void Checkpoint::compare_rest(const Cancellation* cancellation) const { backend_->compare_rest(cancellation); }

}  // namespace tessera::checkpoint
