// Reads safetensors: one file, or a directory of files. In a directory, several files may have the same name if ranks
// saved their shards with PyTorch's HuggingFace writer.

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "checkpoint/source/safetensors_extra.h"
#include "checkpoint/source/shard_index.h"
#include "checkpoint/source/source.h"
#include "tessera/base/checked.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/checkpoint/internal/file_names.h"
#include "tessera/checkpoint/sidecar.h"
#include "tessera/format/internal/json_path.h"
#include "tessera/format/python_value.h"
#include "tessera/format/safetensors.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;
using safetensors_extra::Json;
namespace {

class SafetensorsSource final : public SourceBackend {
 public:
  SafetensorsSource(fs::path path_in, std::shared_ptr<const Storage> storage_in, std::optional<Sidecar> sidecar)
      : SourceBackend(std::move(path_in), std::move(storage_in), std::move(sidecar)) {
    kind = SourceKind::safetensors;
    version = "safetensors";
    tree_ = std::make_shared<pickle::Tree>();
  }

  void read_file_source() {
    take_file(path.filename().string());
    finish_extras();
  }

  // `index_name` is that of its index, or empty.
  void read_directory_source(const std::string& index_name) {
    std::set<std::string> names;
    for (const std::string& name : storage->list()) {
      if (name.ends_with(kSafetensorsSuffix)) names.insert(name);
    }
    std::optional<ShardIndex> index;
    if (!index_name.empty()) {
      index.emplace(*this, index_name);
      for (const std::string& name : names) {
        if (!index->files().contains(name)) {
          warnings.push_back(fmt::format("'{}' is not in the index and is ignored", name));
        }
      }
      names = index->files();
    }
    for (const std::string& name : names) take_file(name);
    if (!index) check_shards_are_all_there(names);
    if (index) index->check();
    finish_extras();
  }

  Extent locate(std::size_t tensor, std::size_t chunk) const override {
    const StoredRange& stored = tensors[tensor].stored[chunk];
    return {stored.file, stored.offset_bytes, stored.length_bytes, {}, std::nullopt};
  }

  ObjectValue load_object(std::size_t i) const override {
    ObjectValue result;
    result.tree = tree_;
    result.value = object_values_[i];
    return result;
  }

 private:
  void take_file(const std::string& name) {
    const std::uint32_t number = add_file(name);
    const std::shared_ptr<const ByteSource> file = open_file(number);
    const safetensors::Header header = safetensors::read_header(*file);
    const auto offsets = safetensors::dcp_saved_offsets(header, file->name());
    if (offsets) version = "safetensors, sharded by ranks";
    const std::map<std::string, DType> dtypes = read_dtypes(header, file->name());
    for (const safetensors::Tensor& stored : header.tensors) {
      std::vector<std::int64_t> offset(stored.shape.size(), 0);
      if (offsets) {
        const auto found = offsets->find(stored.name);
        if (found == offsets->end()) {
          fail(ErrorCode::corrupt, "{}: tensor '{}' is not in DCP_SHARDING_INFO, expected its offsets there",
               file->name(), printable(stored.name));
        }
        if (found->second.size() != stored.shape.size()) {
          fail(ErrorCode::corrupt, "{}: tensor '{}': DCP_SHARDING_INFO has {} offsets, expected {}, one per dimension",
               file->name(), printable(stored.name), found->second.size(), stored.shape.size());
        }
        offset = found->second;
      }
      add_chunk(stored, std::move(offset), offsets.has_value(), dtypes,
                {number, header.data_offset_bytes + stored.begin_bytes, stored.end_bytes - stored.begin_bytes},
                file->name());
    }
    take_extras(header, file->name());
  }

  // Returns f(). An error of it names the file, the key of `__metadata__`, and the tensor or object.
  template <typename F>
  static auto in_extra(const std::string& file, std::string_view key, const std::string& name, const F& f) {
    return with_context([&] { return fmt::format("{}: {} of '{}'", file, key, printable(name)); }, f);
  }

  static std::map<std::string, DType> read_dtypes(const safetensors::Header& header, const std::string& file) {
    std::map<std::string, DType> dtypes;
    const Json json = safetensors_extra::find_extra(header.metadata, safetensors_extra::kDTypes, file);
    for (const auto& item : json.items()) {
      dtypes.emplace(item.key(),
                     in_extra(file, safetensors_extra::kDTypes, item.key(), [&] { return dtype_of(item.value()); }));
    }
    return dtypes;
  }

  static DType dtype_of(const Json& json) {
    if (!json.is_string()) fail(ErrorCode::corrupt, "found a JSON {}, expected a string", json.type_name());
    return dtype_from_name(json.get<std::string>());
  }

  void add_chunk(const safetensors::Tensor& stored, std::vector<std::int64_t> offset, bool sharded,
                 const std::map<std::string, DType>& dtypes, const StoredRange& range, const std::string& file) {
    DType dtype = stored.dtype;
    std::vector<std::int64_t> sizes = stored.shape;
    if (const auto real = dtypes.find(stored.name); real != dtypes.end()) {
      dtype = real->second;
      if (dtype_size(dtype) == 2 * dtype_size(stored.dtype)) {
        if (sizes.empty() || sizes.back() != 2 || offset.back() != 0) {
          fail(ErrorCode::corrupt, "{}: tensor '{}': {} is stored with shape {}, expected pairs in the last dimension",
               file, printable(stored.name), dtype_name(dtype), shape_to_string(sizes));
        }
        sizes.pop_back();
        offset.pop_back();
      } else if (dtype_size(dtype) != dtype_size(stored.dtype)) {
        fail(ErrorCode::corrupt, "{}: tensor '{}': {} is stored as {}, expected a dtype of {} bytes", file,
             printable(stored.name), dtype_name(dtype), dtype_name(stored.dtype), dtype_size(dtype));
      }
    }
    const auto [known, is_new] = numbers_.try_emplace(stored.name, tensors.size());
    if (is_new) {
      TensorInfo info;
      info.name = stored.name;
      info.dtype = dtype;
      info.shape.assign(sizes.size(), 0);
      info.chunks = BoxList(sizes.size());
      info.position = tensors.size() + objects.size();
      tensors.push_back(std::move(info));
    }
    TensorInfo& info = tensors[known->second];
    const auto where = [&] { return fmt::format("{}: tensor '{}'", file, printable(stored.name)); };
    const auto other_file = [&] { return printable(files[info.stored[0].file].name); };
    if (!is_new && !sharded) {
      fail(ErrorCode::corrupt, "{} is in '{}' too, expected it in one file", where(), other_file());
    }
    if (!is_new && (info.dtype != dtype || info.shape.size() != sizes.size())) {
      fail(ErrorCode::corrupt, "{} has dtype {} and {} dimensions, expected {} and {} as in '{}'", where(),
           dtype_name(dtype), sizes.size(), dtype_name(info.dtype), info.shape.size(), other_file());
    }
    with_context(where, [&] {
      for (std::size_t d = 0; d < sizes.size(); ++d) {
        info.shape[d] = std::max(info.shape[d], checked_add(offset[d], sizes[d], "the end of a saved shard"));
      }
      checked_multiply(checked_numel(info.shape, "the shape"), dtype_size(info.dtype), "the size");
    });
    info.chunks.push_back(Box(std::move(offset), std::move(sizes)));
    info.stored.push_back(range);
  }

  void take_extras(const safetensors::Header& header, const std::string& file) {
    for (const auto& [key, value] : header.metadata) {
      if (safetensors_extra::is_reserved(key)) continue;
      const auto [found, is_new] = metadata.try_emplace(key, value);
      if (!is_new && found->second != value) {
        warnings.push_back(
            fmt::format("{}: the metadata '{}' is another than in a file before, which counts", file, printable(key)));
      }
    }
    const Json values = safetensors_extra::find_extra(header.metadata, safetensors_extra::kObjects, file);
    for (const auto& item : values.items()) {
      objects.push_back({item.key(), {}, {}, tensors.size() + objects.size()});
      object_values_.push_back(in_extra(file, safetensors_extra::kObjects, item.key(),
                                        [&] { return pickle::from_lossless_json(item.value(), *tree_); }));
    }
    const Json paths = safetensors_extra::find_extra(header.metadata, safetensors_extra::kPaths, file);
    for (const auto& item : paths.items()) {
      // Each file with a chunk of a tensor has its path.
      paths_[item.key()] = in_extra(file, safetensors_extra::kPaths, item.key(), [&] { return path_of(item.value()); });
    }
  }

  static Path path_of(const Json& items) {
    if (!items.is_array()) fail(ErrorCode::corrupt, "found a JSON {}, expected a list", items.type_name());
    Path result;
    for (const Json& item : items) {
      std::optional<Key> part = json::path_part(item);
      if (!part) {
        fail(ErrorCode::corrupt, "found {} in the path, expected {}",
             item.is_number() ? item.dump() : fmt::format("a JSON {}", item.type_name()), json::kPathParts);
      }
      result.push_back(*std::move(part));
    }
    return result;
  }

  void finish_extras() {
    for (TensorInfo& tensor : tensors) {
      if (const auto found = paths_.find(tensor.name); found != paths_.end()) tensor.path = found->second;
    }
    for (ObjectInfo& object : objects) {
      if (const auto found = paths_.find(object.name); found != paths_.end()) object.path = found->second;
    }
  }

  // Missing shards show only in the sidecar and in the names of the others: a tensor without its last rows looks like
  // a smaller tensor. Names of ranks' shards are no proof, so that they are a warning.
  void check_shards_are_all_there(const std::set<std::string>& names) {
    MissingFiles::NamesOfFile missing;
    if (const std::optional<Sidecar> sidecar = read_sidecar(*storage)) {
      for (const auto& [name, facts] : sidecar->files) {
        if (name.ends_with(kSafetensorsSuffix) && !names.contains(name)) missing[name] = {};
      }
    }
    const std::string_view listed_by = missing.empty() ? "the names of the others announce" : "the sidecar lists";
    if (missing.empty()) {
      const MissingShards announced = missing_shards({names.begin(), names.end()});
      for (const std::string& name : announced.lost) missing[name] = {};
      for (const std::string& name : announced.lost_or_never_written) {
        warnings.push_back(fmt::format(
            "no rank has a file '{}', which the names of the others announce: no tensor was in it, or it was lost",
            printable(name)));
      }
    }
    if (missing.empty()) return;
    throw MissingFiles(
        fmt::format("{}: the save was never completed, or a file that {} was lost", storage->name(), listed_by),
        std::move(missing));
  }

  std::shared_ptr<pickle::Tree> tree_;
  std::vector<pickle::NodeRef> object_values_;
  TextMap<std::size_t> numbers_;
  TextMap<Path> paths_;
};

}  // namespace

std::unique_ptr<SourceBackend> open_safetensors_directory(const std::shared_ptr<const Storage>& storage,
                                                          const OpenOptions& options, const std::string& index) {
  auto source = std::make_unique<SafetensorsSource>(storage->name(), storage, sidecar_of(*storage, options));
  source->read_directory_source(index);
  return source;
}

std::unique_ptr<SourceBackend> open_safetensors_file(const fs::path& file, const OpenOptions& options) {
  auto source =
      std::make_unique<SafetensorsSource>(file, file_system_storage(file.parent_path()), sidecar_of(file, options));
  source->read_file_source();
  return source;
}

}  // namespace tessera::checkpoint
