// Plans safetensors output: `model.safetensors`, or `model-0000k-of-0000n.safetensors` with an index if the size limit
// requires several files.

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/convert/output_plan.h"
#include "checkpoint/source/safetensors_extra.h"
#include "tessera/base/error.h"
#include "tessera/format/internal/json_structure.h"
#include "tessera/format/python_value.h"
#include "tessera/format/safetensors.h"

namespace tessera::checkpoint {
namespace {

using safetensors_extra::add_extra;
using safetensors_extra::add_path;
using safetensors_extra::Json;
using safetensors_extra::StoredAs;

constexpr std::size_t kMaxFiles = 99'999;                    // as their names have five digits
constexpr std::uint64_t kDefaultShardBytes = 5'000'000'000;  // the default of Hugging Face's writers

StoredAs stored_as(const OutputTensor& tensor) {
  return safetensors_extra::stored_as(tensor.dtype, tensor.info->shape);
}

class SafetensorsPlanner {
 public:
  explicit SafetensorsPlanner(std::shared_ptr<const OutputSource> source) : source_(std::move(source)) {}

  OutputPlan plan(const std::string& file_name) {
    const bool is_mapped = !source_->options().file_of_tensor.empty();
    const std::vector<std::vector<std::size_t>> groups = !file_name.empty() ? one_group()
                                                         : is_mapped        ? group_by_map()
                                                                            : group_by_size();
    collect_extras();
    safetensors::Index index;
    std::uint64_t total = 0;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const std::string name = file_name.empty() ? safetensors::shard_file_name(g, groups.size()) : file_name;
      add_file(name, groups[g], g == 0);
      for (const std::size_t tensor : groups[g]) {
        index.weight_map[source_->tensors()[tensor].info->name] = name;
        total += bytes_of(tensor);
      }
    }
    if (groups.size() > 1) {
      index.total_size = total;
      plan_.small_files.emplace_back(safetensors::kIndexFileName, safetensors::write_index(index));
    }
    return std::move(plan_);
  }

 private:
  std::uint64_t bytes_of(std::size_t tensor) const {
    const OutputTensor& output = source_->tensors()[tensor];
    return output.info->size_bytes() / static_cast<std::uint64_t>(dtype_size(output.info->dtype)) *
           static_cast<std::uint64_t>(dtype_size(output.dtype));
  }

  std::vector<std::vector<std::size_t>> one_group() const {
    std::vector<std::size_t> all(source_->tensors().size());
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
    return {std::move(all)};
  }

  std::vector<std::vector<std::size_t>> group_by_size() const {
    const std::uint64_t asked = source_->options().max_shard_bytes;
    const std::uint64_t limit = asked == 0 ? kDefaultShardBytes : asked;
    std::vector<std::vector<std::size_t>> groups(1);
    std::uint64_t size = 0;
    for (std::size_t i = 0; i < source_->tensors().size(); ++i) {
      const std::uint64_t bytes = bytes_of(i);
      if (!groups.back().empty() && size + bytes > limit) {
        groups.emplace_back();
        size = 0;
      }
      groups.back().push_back(i);
      size += bytes;
    }
    return groups;
  }

  std::vector<std::vector<std::size_t>> group_by_map() const {
    const std::map<std::string, std::size_t>& files = source_->options().file_of_tensor;
    std::vector<std::vector<std::size_t>> groups;
    for (std::size_t i = 0; i < source_->tensors().size(); ++i) {
      const std::string& name = source_->tensors()[i].info->name;
      const auto file = files.find(name);
      if (file == files.end() || file->second == 0 || file->second > kMaxFiles) {
        fail(ErrorCode::invalid_argument, "convert to safetensors: file_of_tensor has {} for '{}', expected 1 to {}",
             file == files.end() ? "nothing" : std::to_string(file->second), printable(name), kMaxFiles);
      }
      if (groups.size() < file->second) groups.resize(file->second);
      groups[file->second - 1].push_back(i);
    }
    for (std::size_t g = 0; g < groups.size(); ++g) {
      if (!groups[g].empty()) continue;
      fail(ErrorCode::invalid_argument,
           "convert to safetensors: file_of_tensor has no tensor of file {}, expected one for each of {} files", g + 1,
           groups.size());
    }
    if (groups.empty()) groups.emplace_back();
    return groups;
  }

  // Objects and paths go into the first file's __metadata__.
  void collect_extras() {
    Json objects = Json::object(), paths = Json::object();
    const Checkpoint& checkpoint = *source_->checkpoint();
    for (const std::size_t i : source_->objects()) {
      const ObjectInfo& info = checkpoint.objects()[i];
      const ObjectValue value = checkpoint.load_object(i);
      std::optional<Json> lossless = pickle::to_lossless_json(value.value);
      if (!lossless) {
        source_->warn(fmt::format("object '{}' cannot be stored in safetensors: {}", printable(info.name),
                                  pickle::opaque_reason(value.value).value_or("JSON cannot represent it")));
        continue;
      }
      json::add_member(objects, info.name, std::move(*lossless));
      add_path(paths, info.name, info.path);
    }
    for (const OutputTensor& tensor : source_->tensors()) {
      add_path(paths, tensor.info->name, tensor.info->path);
      const StoredAs stored = stored_as(tensor);
      if (stored.dtype == tensor.dtype) continue;
      source_->warn(fmt::format("tensor '{}': safetensors has no {}; it is stored as {}{}",
                                printable(tensor.info->name), dtype_name(tensor.dtype), dtype_name(stored.dtype),
                                stored.as_pairs ? " with a last dimension of 2" : ""));
    }
    add_extra(extras_, safetensors_extra::kObjects, objects);
    add_extra(extras_, safetensors_extra::kPaths, paths);
  }

  void add_file(const std::string& name, const std::vector<std::size_t>& group, bool is_first) {
    struct Entry {
      safetensors::Tensor stored;
      std::size_t tensor;
    };
    std::vector<Entry> placed;
    Json dtypes = Json::object();  // each file lists its own tensors, so that it can be read alone
    for (const std::size_t tensor : group) {
      const OutputTensor& output = source_->tensors()[tensor];
      const StoredAs stored = stored_as(output);
      if (stored.dtype != output.dtype) {
        json::add_member(dtypes, output.info->name, std::string(dtype_name(output.dtype)));
      }
      std::vector<std::int64_t> shape = output.info->shape;
      if (stored.as_pairs) shape.push_back(2);
      placed.push_back({{output.info->name, stored.dtype, std::move(shape)}, tensor});
    }
    std::sort(placed.begin(), placed.end(),
              [](const Entry& a, const Entry& b) { return safetensors_extra::goes_before(a.stored, b.stored); });
    std::vector<safetensors::Tensor> entries;
    std::vector<std::size_t> tensors;
    std::uint64_t offset = 0;
    for (Entry& entry : placed) {
      entry.stored.begin_bytes = offset;
      entry.stored.end_bytes = offset += bytes_of(entry.tensor);
      entries.push_back(std::move(entry.stored));
      tensors.push_back(entry.tensor);
    }
    std::map<std::string, std::string> metadata = source_->checkpoint()->metadata();
    metadata.emplace("format", "pt");
    if (is_first) metadata.insert(extras_.begin(), extras_.end());
    add_extra(metadata, safetensors_extra::kDTypes, dtypes);
    Bytes header = safetensors::write_header(entries, metadata);
    PlannedFile file{name, tensors.size(), {}};
    const std::uint64_t length = header.size() + offset;
    file.units.push_back({length, [source = source_, header = std::move(header), tensors] {
                            Unit unit;
                            unit.segments.emplace_back(header);
                            for (const std::size_t tensor : tensors) {
                              const Box full = Box::full(source->tensors()[tensor].info->shape);
                              unit.segments.emplace_back(source->tensor_data(tensor, full));
                            }
                            return unit;
                          }});
    plan_.files.push_back(std::move(file));
  }

  std::shared_ptr<const OutputSource> source_;
  std::map<std::string, std::string> extras_;
  OutputPlan plan_;
};

}  // namespace

OutputPlan plan_safetensors(const std::shared_ptr<const OutputSource>& source, const std::string& file_name) {
  return SafetensorsPlanner(source).plan(file_name);
}

}  // namespace tessera::checkpoint
