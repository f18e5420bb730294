// Saves in PyTorch's distributed format: data files per rank, committed by `.metadata`.

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "checkpoint/save/commit.h"
#include "checkpoint/save/files.h"
#include "checkpoint/save/format.h"
#include "checkpoint/save/item_layouts.h"
#include "checkpoint/source/source.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/internal/file_names.h"

namespace tessera::checkpoint {
namespace {

class DcpWriter final : public FormatWriter {
 public:
  explicit DcpWriter(const WriteOptions& options)
      : files_per_rank_(options.files_per_rank),
        dialect_(options.dialect),
        save_id_(options.save_id),
        conditions_{options.overwrite, {}} {}

  std::uint64_t chunk_bytes(DType dtype, std::span<const std::int64_t> sizes) override {
    return forms_.of_chunk(dtype, sizes)->total_bytes();
  }

  std::int64_t begin(Storage& storage) override {
    if (!conditions_.overwrite && is_dcp(storage)) {
      fail(ErrorCode::invalid_argument, "save to {}: found a checkpoint, expected none, because overwrite is false",
           storage.name());
    }
    turn_ = begin_save(storage);
    return turn_.generation;
  }

  std::vector<PlannedFile> rank_files(const RankItems& items, int rank, std::int64_t generation,
                                      RankReport& report) override {
    std::vector<ItemSize> sizes;
    std::vector<std::shared_ptr<Bytes>> archives(items.writes.size());  // of the objects
    for (std::size_t k = 0; k < items.writes.size(); ++k) {
      const SavePlan::WriteItem item = items.plan[items.writes[k]];
      const bool is_object = !items.plan.entries()[item.entry].is_tensor;
      sizes.push_back({item.stored_bytes, is_object});
      if (!is_object) continue;
      archives[k] = std::make_shared<Bytes>(items.planner.resolve_object(items.state, items.plan, items.writes[k]));
      sizes.back().bytes = archives[k]->size();
      report.object_bytes.push_back(archives[k]->size());
    }
    const FilePlan plan = place_items(sizes, files_per_rank_);
    std::vector<PlannedFile> files;
    for (std::size_t f = 0; f < plan.file_bytes.size(); ++f) {
      files.push_back({to_string(DataFileName{rank, static_cast<std::int64_t>(f), generation}), 0, {}});
      conditions_.own_files.push_back(files.back().name);
    }
    for (const std::size_t k : plan.order) {
      PlannedFile& file = files[plan.places[k].file];
      file.units.push_back({sizes[k].bytes, [this, items, i = items.writes[k], archive = archives[k]] {
                              return make_unit(items, i, archive);
                            }});
      file.tensors += archives[k] ? 0 : 1;
    }
    return files;
  }

  std::vector<std::string> commit(Storage& storage, GlobalSavePlan& plan, const std::vector<RankReport>& reports,
                                  const std::vector<std::size_t>& files_per_rank, std::int64_t generation) override {
    dcp::Metadata& metadata = plan.metadata;
    metadata.dialect = dialect_;
    const bool has_class = dialect_ != dcp::Dialect::torch_1_13 && dialect_ != dcp::Dialect::torch_2_0;
    metadata.storage_meta.reset();
    if (has_class) {
      dcp::StorageMeta meta;
      meta.save_id = save_id_;
      metadata.storage_meta = std::move(meta);
    }
    metadata.files.clear();
    metadata.transforms = {{}};
    Sidecar sidecar;
    for (std::size_t rank = 0; rank < reports.size(); ++rank) {
      const RankReport& report = reports[rank];
      auto& lists = metadata.transforms;
      const auto found = std::find(lists.begin(), lists.end(), report.descriptors);
      const auto transforms = static_cast<std::uint32_t>(found - lists.begin());
      if (found == lists.end()) lists.push_back(report.descriptors);
      place_rank(plan, rank, files_per_rank.at(rank), {report.object_bytes, report.transformed_bytes}, transforms,
                 generation);
      sidecar.files.insert(reports[rank].files.files.begin(), reports[rank].files.files.end());
    }
    checkpoint::commit(
        storage, turn_, conditions_, [&](const auto& sink) { dcp::write(metadata, sink); }, sidecar);
    std::set<std::string> referenced;
    for (const auto& [name, facts] : sidecar.files) referenced.insert(name);
    return remove_unreferenced(storage, referenced, generation);
  }

 private:
  // `archive` is null for a tensor.
  Unit make_unit(const RankItems& items, std::uint32_t i, const std::shared_ptr<Bytes>& archive) {
    if (archive) {
      Unit unit;
      unit.segments.emplace_back(std::move(*archive));
      return unit;
    }
    const SavePlan::WriteItem item = items.plan[i];
    const std::shared_ptr<const ItemForm> form =
        forms_.of_chunk(items.plan.entries()[item.entry].properties->dtype, item.box.sizes);
    Unit unit;
    unit.segments.reserve(3);
    unit.segments.emplace_back(form->head);
    unit.segments.emplace_back(item_data(items, i));
    unit.segments.emplace_back(Late{form->tail.size(), true, [form](const std::vector<std::uint32_t>& crcs) {
                                      return form->tail_with(crcs.at(0));
                                    }});
    return unit;
  }

  std::size_t files_per_rank_;
  dcp::Dialect dialect_;
  std::optional<std::string> save_id_;
  ItemForms forms_;
  CommitConditions conditions_;
  SaveTurn turn_;  // on the coordinator
};

}  // namespace

std::unique_ptr<FormatWriter> make_dcp_writer(const WriteOptions& options) {
  return std::make_unique<DcpWriter>(options);
}

}  // namespace tessera::checkpoint
