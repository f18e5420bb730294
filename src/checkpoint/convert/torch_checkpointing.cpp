// Plans a directory of torch_checkpointing: a file of each rank for each item, and `metadata.pkl`.
//
// A rank's part of a sharded tensor is saved as a plain tensor. The package's loader reads it as that part, because
// `metadata.pkl` describes it; a DTensor in a pickle would bind the file to one version of PyTorch's DeviceMesh. A
// loader that has the same sharding as the file reads without looking at the description, and then expects DTensors. So
// the mesh has a dimension of a name that no program gives, which makes the loader reshard.

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <utility>

#include "checkpoint/convert/nested_archive.h"
#include "tessera/base/error.h"
#include "tessera/format/internal/json_path.h"
#include "tessera/format/torch_checkpointing.h"
#include "tessera/layout/sharding.h"

namespace tessera::checkpoint {
namespace {

namespace tc = torch_checkpointing;
using ArchiveLeaf = NestedArchivePlanner::Leaf;

constexpr std::string_view kMeshDimension = "tessera";
constexpr std::string_view kOnlyItem = "model";

// Returns the first dimension in which a tensor is sharded, or nothing if one rank has it all.
std::optional<std::int64_t> sharded_dim(const TensorInfo& info) {
  for (std::size_t c = 0; c < info.chunks.size(); ++c) {
    if (is_empty(info.chunks[c])) continue;
    for (std::size_t d = 0; d < info.shape.size(); ++d) {
      if (info.chunks[c].sizes[d] != info.shape[d]) return static_cast<std::int64_t>(d);
    }
  }
  return std::nullopt;
}

// Returns the path of a leaf in its item, as `metadata.pkl` has it: the keys that are ints are numbers.
Path listed_path(const ArchiveLeaf& leaf) {
  Path path = leaf.path;
  for (const PathKey& key : leaf.keys) {
    const nlohmann::json parsed = nlohmann::json::parse(key.json, nullptr, false);
    if (std::optional<Key> part = json::path_part(parsed)) path[key.part] = *std::move(part);
  }
  return path;
}

class TorchCheckpointingPlanner {
 public:
  explicit TorchCheckpointingPlanner(std::shared_ptr<const OutputSource> source)
      : source_(std::move(source)), archives_(source_) {}

  OutputPlan plan() {
    count_ranks();
    std::map<std::string, std::vector<ArchiveLeaf>> items;
    const std::vector<ArchiveLeaf> leaves = leaves_of(*source_);
    const auto other = std::find_if_not(leaves.begin(), leaves.end(), [](const ArchiveLeaf& leaf) {
      const auto* key = std::get_if<std::string>(&leaf.path[0]);
      const bool is_text = key != nullptr && (leaf.keys.empty() || leaf.keys[0].part > 0);
      return is_text && tc::is_item_key(*key);
    });
    const bool has_items = other == leaves.end();
    if (!has_items) {
      source_->warn(fmt::format("the state becomes the item '{}': the key of '{}' at its root cannot name an item",
                                kOnlyItem, printable(*other->name)));
    }
    for (const ArchiveLeaf& leaf : leaves) {
      ArchiveLeaf in_item = leaf;
      if (has_items) {
        in_item.path.erase(in_item.path.begin());
        for (PathKey& key : in_item.keys) --key.part;
      }
      items[has_items ? std::get<std::string>(leaf.path[0]) : std::string(kOnlyItem)].push_back(std::move(in_item));
    }
    for (const auto& [key, of_item] : items) add_item(key, of_item);
    metadata_.ranks = ranks_;
    plan_.small_files.emplace_back(tc::kMetadataFileName, tc::write(metadata_));
    return std::move(plan_);
  }

 private:
  void count_ranks() {
    std::set<std::int64_t> holders;
    const Checkpoint& checkpoint = *source_->checkpoint();
    for (const OutputTensor& tensor : source_->tensors()) {
      dims_.push_back(sharded_dim(*tensor.info));
      if (!dims_.back()) continue;
      for (std::size_t c = 0; c < tensor.info->chunks.size(); ++c) {
        const std::uint32_t file = tensor.info->stored[c].file;
        if (is_empty(tensor.info->chunks[c]) || file == StoredRange::kNoFile) continue;
        holders.insert(checkpoint.files()[file].rank.value_or(file));
      }
    }
    ranks_ = std::max<std::int64_t>(std::ssize(holders), 1);
    auto replicas = std::make_shared<tc::Mesh>();
    replicas->shape = {ranks_};
    replicas->ranks.resize(static_cast<std::size_t>(ranks_));
    std::iota(replicas->ranks.begin(), replicas->ranks.end(), 0);
    auto shards = std::make_shared<tc::Mesh>(*replicas);
    shards->dim_names = {std::string(kMeshDimension)};
    replicas_ = std::move(replicas);
    shards_ = std::move(shards);
  }

  void add_item(const std::string& key, const std::vector<ArchiveLeaf>& leaves) {
    tc::Item item;
    item.key = key;
    std::vector<BoxList> boxes(leaves.size());  // of each rank, if the tensor is sharded
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      if (!leaves[i].is_tensor) continue;
      const OutputTensor& tensor = source_->tensors()[leaves[i].number];
      const std::optional<std::int64_t> dim = dims_[leaves[i].number];
      tc::Group group{tensor.dtype,
                      tensor.info->shape,
                      dim ? shards_ : replicas_,
                      {dim ? Placement::shard(*dim) : Placement::replicate()}};
      item.entries.push_back({listed_path(leaves[i]), {std::move(group)}});
      if (dim) {
        boxes[i] = chunk_boxes(tensor.info->shape, *dim, ranks_);
      } else {
        source_->expect_reads(leaves[i].number, static_cast<std::uint64_t>(ranks_));
      }
    }
    for (std::int64_t rank = 0; rank < ranks_; ++rank) {
      std::vector<ArchiveLeaf> of_rank = leaves;
      std::uint64_t tensors = 0;
      for (std::size_t i = 0; i < leaves.size(); ++i) {
        if (!leaves[i].is_tensor) continue;
        ++tensors;
        if (dims_[leaves[i].number]) of_rank[i].box = Box(boxes[i][static_cast<std::size_t>(rank)]);
      }
      PlannedFile file{tc::to_string({key, rank}), tensors, {}};
      file.units.push_back(archives_.plan(of_rank, "archive"));
      plan_.files.push_back(std::move(file));
    }
    // The loader takes an item without tensors as it is.
    if (!item.entries.empty()) metadata_.items.push_back(std::move(item));
  }

  std::shared_ptr<const OutputSource> source_;
  NestedArchivePlanner archives_;
  std::vector<std::optional<std::int64_t>> dims_;  // of each tensor that is sharded
  std::int64_t ranks_ = 1;
  std::shared_ptr<const tc::Mesh> replicas_, shards_;
  tc::CheckpointMetadata metadata_;
  OutputPlan plan_;
};

}  // namespace

OutputPlan plan_torch_checkpointing(const std::shared_ptr<const OutputSource>& source) {
  return TorchCheckpointingPlanner(source).plan();
}

}  // namespace tessera::checkpoint
