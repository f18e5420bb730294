// Saves as the safetensors shards of PyTorch's HuggingFace writer, committed by renaming them.

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "checkpoint/save/commit.h"
#include "checkpoint/save/files.h"
#include "checkpoint/save/format.h"
#include "checkpoint/source/safetensors_extra.h"
#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/checkpoint/internal/file_names.h"
#include "tessera/format/internal/json_structure.h"
#include "tessera/format/python_value.h"
#include "tessera/format/safetensors.h"
#include "tessera/format/torch_archive.h"

namespace tessera::checkpoint {
namespace {

using safetensors_extra::Json;

// Returns the value of an object as JSON. Throws Error(unsupported) if JSON cannot represent it.
Json object_json(const std::string& name, const Bytes& archive) {
  const torch_archive::Archive opened = torch_archive::open(MemorySource(archive, name), 0, archive.size());
  const pickle::NodeRef value = opened.tree.root();
  std::optional<Json> json = pickle::to_lossless_json(value);
  if (!json) {
    fail(ErrorCode::unsupported,
         "save '{}': safetensors cannot store this object, expected a value that JSON represents: {}", printable(name),
         pickle::opaque_reason(value).value_or("it contains itself"));
  }
  return std::move(*json);
}

class SafetensorsWriter final : public FormatWriter {
 public:
  explicit SafetensorsWriter(const WriteOptions& options) : files_per_rank_(options.files_per_rank) {}

  std::uint64_t chunk_bytes(DType dtype, std::span<const std::int64_t> sizes) override {
    std::int64_t bytes = dtype_size(dtype);
    for (const std::int64_t size : sizes) bytes *= size;
    return static_cast<std::uint64_t>(bytes);
  }

  std::int64_t begin(Storage& storage) override {
    turn_ = begin_save(storage);
    const std::vector<std::string> names = storage.list();
    const Shards interrupted = interrupted_commit(storage, names, {});
    require_no_checkpoint(storage, names, interrupted);
    for (const std::string& name : names) {
      const auto parsed = parse_uncommitted_name(name);
      if (!parsed || parsed->name == kMetadataFileName) continue;
      const auto of_interrupted = interrupted.find(parsed->name);
      if (of_interrupted == interrupted.end() || of_interrupted->second != name) storage.remove(name);
    }
    // These are the last: when they are gone, a save may begin that takes the generation of one that was removed.
    if (!remove_interrupted(storage, interrupted)) {
      fail(ErrorCode::invalid_argument,
           "save to {}: found that another save began meanwhile, expected none: save to a directory one at a time",
           storage.name());
    }
    return turn_.generation;
  }

  std::vector<PlannedFile> rank_files(const RankItems& items, int rank, std::int64_t generation,
                                      RankReport& /*report*/) override {
    std::vector<std::vector<Piece>> groups = group_pieces(items);
    std::map<std::string, std::string> extras = make_extras(items);
    if (groups.empty() && !extras.empty()) groups.emplace_back();
    std::vector<PlannedFile> files;
    for (std::size_t f = 0; f < groups.size(); ++f) {
      const UncommittedName name{safetensors::rank_shard_file_name(static_cast<std::size_t>(rank), f, groups.size()),
                                 generation};
      files.push_back(make_file(items, groups[f], to_string(name), std::exchange(extras, {})));
    }
    return files;
  }

  std::vector<std::string> commit(Storage& storage, GlobalSavePlan& /*plan*/, const std::vector<RankReport>& reports,
                                  const std::vector<std::size_t>& /*files_per_rank*/,
                                  std::int64_t /*generation*/) override {
    Sidecar sidecar;
    std::vector<std::string> written;
    for (const RankReport& report : reports) {
      for (const auto& [name, facts] : report.files.files) {
        written.push_back(name);
        sidecar.files[parse_uncommitted_name(name).value().name] = facts;
      }
    }
    for (const auto& [name, facts] : sidecar.files) shards_.insert(name);
    CommitLock lock(storage, turn_);
    try {
      const std::vector<std::string> names = lock.take(write_sidecar(sidecar, turn_.generation));
      require_no_checkpoint(storage, names, {});
      require_present(storage, names, written);
      if (!interrupted_commit(storage, names, {written.begin(), written.end()}).empty()) {
        fail(ErrorCode::invalid_argument,
             "commit to {}: found shards that another save is committing, expected none: save to a directory one at a "
             "time",
             storage.name());
      }
      storage.sync();
      lock.require_held();
      sidecar_may_be_new_ = true;
      lock.become_sidecar(sidecar);
      storage.sync();
      for (const std::string& name : shards_) {
        storage.rename(uncommitted(name), name);
        renamed_.insert(name);
      }
      storage.sync();
    } catch (const std::exception& error) {
      const auto* known = dynamic_cast<const Error*>(&error);
      undo(storage, lock, known != nullptr ? known->code() : ErrorCode::internal, error.what());
      throw;
    } catch (...) {
      undo(storage, lock, ErrorCode::internal, "an exception of unknown type");
      throw;
    }
    return {};
  }

 private:
  using Shards = std::map<std::string, std::string>;  // the present names, by the final ones

  // The name of a shard of this save until it is committed.
  std::string uncommitted(const std::string& name) const { return to_string(UncommittedName{name, turn_.generation}); }

  // Throws if there is a file of a checkpoint, except `shards`.
  static void require_no_checkpoint(const Storage& storage, const std::vector<std::string>& names,
                                    const Shards& shards) {
    for (const std::string& name : names) {
      const bool is_committed =
          name.ends_with(kSafetensorsSuffix) || name == kMetadataFileName || name == safetensors::kIndexFileName;
      if (!is_committed || shards.contains(name)) continue;
      fail(ErrorCode::invalid_argument,
           "save to {}: found {}, expected no checkpoint, because safetensors shards cannot replace one",
           storage.name(), name);
    }
  }

  // Returns the shards of another save that is renaming them, or was killed while it did: all exist, and some still
  // have temporary names. Returns an empty map for any other checkpoint, even if a file is missing. `names` are the
  // files of the storage, of which this save wrote `written`.
  static Shards interrupted_commit(const Storage& storage, const std::vector<std::string>& names,
                                   const std::set<std::string>& written) {
    const std::optional<Sidecar> sidecar = read_sidecar(storage);
    if (!sidecar) return {};
    Shards of_others;  // with temporary names
    for (const std::string& name : names) {
      const auto parsed = parse_uncommitted_name(name);
      if (parsed && !written.contains(name)) of_others[parsed->name] = name;
    }
    Shards shards;
    bool some_are_uncommitted = false;
    for (const auto& [name, facts] : sidecar->files) {
      const bool is_committed = std::ranges::binary_search(names, name);
      if (!name.ends_with(kSafetensorsSuffix) || (!is_committed && !of_others.contains(name))) return {};
      some_are_uncommitted = some_are_uncommitted || !is_committed;
      shards[name] = is_committed ? name : of_others[name];
    }
    return some_are_uncommitted ? shards : Shards();
  }

  void undo(Storage& storage, CommitLock& lock, ErrorCode code, std::string_view what) const {
    std::string second;
    bool is_overtaken = false;
    try {
      // A rename that failed without an effect left the temporary sidecar.
      if (sidecar_may_be_new_ && !lock.is_held()) {
        const std::optional<Shards> shards = lock.is_overtaken() ? std::nullopt : own_shards(storage);
        is_overtaken = !shards || !remove_interrupted(storage, *shards);
      }
    } catch (const std::exception& error) {
      second = error.what();
    } catch (...) {
      second = "an exception of unknown type";
    }
    if (!second.empty()) {
      throw OutcomeUnknown(code, fmt::format("{}; removing the new checkpoint failed too: {}; it may be complete, and "
                                             "no more of its files were removed",
                                             what, second));
    }
    lock.release();
    if (!is_overtaken) return;
    throw OutcomeUnknown(
        ErrorCode::invalid_argument,
        fmt::format("{}; another save to {} took over, and no file of it was changed", what, storage.name()));
  }

  // Returns the shards of this save after it began to rename them. Returns nothing if one has neither been renamed nor
  // its temporary name: another save, which takes this one for killed, has it.
  std::optional<Shards> own_shards(const Storage& storage) const {
    Shards shards;
    for (const std::string& name : shards_) {
      shards[name] = renamed_.contains(name) ? name : uncommitted(name);
      if (!renamed_.contains(name) && !storage.size_bytes(shards[name])) return std::nullopt;
    }
    return shards;
  }

  // Removes the sidecar and the shards of an interrupted commit. Returns false if yet another save has taken the
  // shards; no file is changed then that may be of it. First all shards get temporary names of this save, so that after
  // each step the storage is still recognized as an interrupted commit or as uncommitted files. Those that have
  // temporary names are the first: if the other save was only slow, its next rename fails, and if it has continued, so
  // does that of this save, before a shard of a complete checkpoint is renamed.
  bool remove_interrupted(Storage& storage, const Shards& shards) const {
    if (shards.empty()) return true;
    std::string taken;  // the first shard that has its new name; a save that takes over from this one takes it, too
    const auto has_taken = [&] { return taken.empty() || storage.size_bytes(taken).has_value(); };
    for (const bool is_committed : {false, true}) {
      for (const auto& [name, present] : shards) {
        if ((present == name) != is_committed) continue;
        const std::string own = uncommitted(name);
        if (is_committed) {
          if (!rename_if(storage, name, own, has_taken)) return false;
        } else if (present != own && !rename_if_present(storage, present, own)) {
          return false;
        }
        if (taken.empty()) taken = own;
      }
    }
    storage.sync();
    if (!rename_if(storage, std::string(kSidecarFileName), name_to_remove(turn_), has_taken)) return false;
    storage.remove(name_to_remove(turn_));
    storage.sync();
    for (const auto& [name, present] : shards) storage.remove(uncommitted(name));
    return true;
  }

  // A chunk of a tensor in a file.
  struct Piece {
    std::uint32_t entry = 0;
    std::optional<std::uint32_t> item = std::nullopt;  // empty for a tensor without elements and without a chunk
  };

  // Returns the pieces of each file: in order, files about equal in bytes, each name at most once per file.
  std::vector<std::vector<Piece>> group_pieces(const RankItems& items) const {
    const std::vector<SavePlan::Entry>& entries = items.plan.entries();
    std::vector<Piece> pieces;
    std::vector<ItemSize> sizes;
    for (const std::uint32_t i : items.writes) {
      const SavePlan::WriteItem item = items.plan[i];
      if (!entries[item.entry].is_tensor) continue;
      pieces.push_back({item.entry, i});
      sizes.push_back({item.stored_bytes, false});
    }
    std::vector<bool> has_chunk(entries.size());
    for (std::size_t i = 0; i < items.plan.size(); ++i) has_chunk[items.plan[i].entry] = true;
    for (std::uint32_t e = 0; e < entries.size(); ++e) {
      if (!entries[e].is_tensor || has_chunk[e] || volume(Box::full(entries[e].shape)) != 0) continue;
      pieces.push_back({e});
      sizes.push_back({});
    }
    const FilePlan by_size = place_items(sizes, files_per_rank_);
    std::vector<std::vector<Piece>> groups;
    std::map<std::uint32_t, std::size_t> next_file;  // first file without a piece of the entry
    for (std::size_t k = 0; k < pieces.size(); ++k) {
      std::size_t& next = next_file[pieces[k].entry];
      const std::size_t file = std::max<std::size_t>(by_size.places[k].file, next);
      if (file >= groups.size()) groups.resize(file + 1);
      groups[file].push_back(pieces[k]);
      next = file + 1;
    }
    return groups;
  }

  // Returns the `__metadata__` of a rank's first file: its objects, and the paths of its names in the state dict.
  static std::map<std::string, std::string> make_extras(const RankItems& items) {
    Json objects = Json::object(), paths = Json::object();
    std::vector<bool> is_added(items.plan.entries().size());  // a rank may write several chunks of a tensor
    for (const std::uint32_t i : items.writes) {
      const std::size_t number = items.plan[i].entry;
      if (is_added[number]) continue;
      is_added[number] = true;
      const SavePlan::Entry& entry = items.plan.entries()[number];
      safetensors_extra::add_path(paths, entry.name, entry.path);
      if (entry.is_tensor) continue;
      json::add_member(objects, entry.name,
                       object_json(entry.name, items.planner.resolve_object(items.state, items.plan, i)));
    }
    std::map<std::string, std::string> extras;
    safetensors_extra::add_extra(extras, safetensors_extra::kObjects, objects);
    safetensors_extra::add_extra(extras, safetensors_extra::kPaths, paths);
    return extras;
  }

  static PlannedFile make_file(const RankItems& items, const std::vector<Piece>& pieces, std::string name,
                               std::map<std::string, std::string> extras) {
    struct Stored {
      safetensors::Tensor tensor;
      std::optional<std::uint32_t> item;
      std::uint64_t bytes;
    };
    std::vector<Stored> all;
    std::map<std::string, std::vector<std::int64_t>> saved_offsets;
    Json dtypes = Json::object();
    for (const Piece& piece : pieces) {
      const SavePlan::Entry& entry = items.plan.entries()[piece.entry];
      const std::uint64_t bytes = piece.item ? items.plan[*piece.item].stored_bytes : 0;
      // Readers compute a tensor's shape from the ends of its chunks, so a tensor without elements stores its full
      // shape.
      const Box box = bytes == 0 ? Box::full(entry.shape) : Box(items.plan[*piece.item].box);
      std::vector<std::int64_t> sizes = box.sizes, offsets = box.offsets;
      const DType dtype = entry.properties.value_or(TensorProperties()).dtype;
      const safetensors_extra::StoredAs stored = safetensors_extra::stored_as(dtype, sizes);
      if (stored.dtype != dtype) json::add_member(dtypes, entry.name, std::string(dtype_name(dtype)));
      if (stored.as_pairs) {
        sizes.push_back(2);
        offsets.push_back(0);
      }
      saved_offsets[entry.name] = std::move(offsets);
      all.push_back({{entry.name, stored.dtype, std::move(sizes)}, piece.item, bytes});
    }
    std::sort(all.begin(), all.end(),
              [](const Stored& a, const Stored& b) { return safetensors_extra::goes_before(a.tensor, b.tensor); });
    std::vector<safetensors::Tensor> tensors;
    std::uint64_t offset = 0;
    for (Stored& one : all) {
      one.tensor.begin_bytes = offset;
      one.tensor.end_bytes = offset += one.bytes;
      tensors.push_back(std::move(one.tensor));
    }
    std::map<std::string, std::string> metadata = safetensors::dcp_metadata(saved_offsets);
    metadata.merge(extras);
    safetensors_extra::add_extra(metadata, safetensors_extra::kDTypes, dtypes);
    Bytes header = safetensors::write_header(tensors, metadata);
    PlannedFile file{std::move(name), all.size(), {}};
    file.units.push_back({header.size(), [header = std::move(header)] {
                            Unit unit;
                            unit.segments.emplace_back(header);
                            return unit;
                          }});
    for (const Stored& one : all) {
      if (one.bytes == 0) continue;
      file.units.push_back({one.bytes, [items, i = *one.item] {
                              Unit unit;
                              unit.segments.emplace_back(item_data(items, i));
                              return unit;
                            }});
    }
    return file;
  }

  std::size_t files_per_rank_;
  // On the coordinator:
  SaveTurn turn_;
  std::set<std::string> shards_, renamed_;  // the final names of all ranks' shards, and of those that were renamed
  bool sidecar_may_be_new_ = false;
};

}  // namespace

std::unique_ptr<FormatWriter> make_safetensors_writer(const WriteOptions& options) {
  return std::make_unique<SafetensorsWriter>(options);
}

}  // namespace tessera::checkpoint
