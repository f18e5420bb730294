#include "tessera/state/load.h"

#include <ATen/ops/empty.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

#include "state/flat_values.h"
#include "state/local_state.h"
#include "state/local_tensor.h"
#include "state/process_group_link.h"
#include "state/stateful/values.h"
#include "state/transport/device_staging.h"
#include "tessera/base/error.h"
#include "tessera/state/object_archive.h"
#include "tessera/tensor/internal/box_view.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

namespace {

using checkpoint::Checkpoint;

// Opens the checkpoint on all ranks, or throws on all.
using Open = std::function<std::shared_ptr<const Checkpoint>(checkpoint::RankLink& link,
                                                             const checkpoint::OpenOptions& options)>;

// Flattens by the rules since 2.4. If the checkpoint has names that only the older rules give, uses those. The names in
// a torch.save file always follow the newer rules.
std::vector<FlatValue> flatten_as_saved(const StateDict& state, const Checkpoint& checkpoint) {
  std::vector<FlatValue> values = flat_values(state);
  if (checkpoint.kind() == checkpoint::SourceKind::torch) return values;
  const auto is_stored = [&](const FlatValue& one) {
    return checkpoint.find_tensor(one.name) || checkpoint.find_object(one.name);
  };
  const auto found = static_cast<std::size_t>(std::count_if(values.begin(), values.end(), is_stored));
  if (found == checkpoint.tensors().size() + checkpoint.objects().size()) return values;
  std::set<std::string_view> names;
  for (const FlatValue& one : values) names.insert(one.name);
  std::vector<FlatValue> old = flat_values(state, TraversalRules::until_2_3);
  const bool is_old = std::any_of(old.begin(), old.end(),
                                  [&](const FlatValue& one) { return !names.contains(one.name) && is_stored(one); });
  return is_old ? old : values;
}

class StateLoader {
 public:
  StateLoader(const StateDict& state, const Checkpoint& checkpoint, const ProcessGroup& group,
              const LoadOptions& options)
      : stagings_(options.staging_bytes) {
    std::vector<FlatValue> values =
        options.flatten_state_dict ? flatten_as_saved(state, checkpoint) : outermost_values(state);
    if (options.flatten_sharded_tensors) flatten_nested(values, group);
    targets_.reserve(values.size());
    for (FlatValue& one : values) {
      try {
        add(one);
      } catch (const Error& error) {
        fail(error.code(), "load '{}': {}", printable(one.name), error.what());
      }
    }
  }

  const checkpoint::Targets& targets() const { return targets_; }

  // Copies tensors that were loaded to temporary memory, and puts the objects into `state`.
  void finish(StateDict& state, const Checkpoint& checkpoint, const checkpoint::ReadReport& report) {
    for (auto& [tensor, loaded] : staged_) tensor.copy_(loaded);
    std::vector<std::pair<const Path*, Value>> objects;
    for (const auto& [name, object] : report.objects) {
      objects.emplace_back(&object_paths_.find(name)->second,
                           load_object(object, [&](std::uint32_t file) { return checkpoint.open_file(file); }));
    }
    for (auto& [path, value] : objects) set_element(state, *path, std::move(value));
  }

 private:
  // Takes the name and the path, unless it throws.
  void add(FlatValue& one) {
    std::optional<LocalTensor> local = attached_tensor_of(one.value);
    if (!local) {
      object_paths_.emplace(one.name, std::move(one.path));
      targets_.push_back({std::move(one.name), checkpoint::TargetObject{}});
      return;
    }
    const DType dtype = local->properties ? local->properties->dtype : TensorProperties().dtype;
    checkpoint::TargetTensor target{dtype, std::move(local->shape), {}};
    target.chunks.reserve(local->chunks.size());
    for (auto& [box, tensor] : local->chunks) {
      if (overlaps_itself(tensor)) {
        fail(ErrorCode::invalid_argument,
             "the tensor of {} has overlapping elements, expected separate memory for each", to_string(box));
      }
      if (!tensor.is_cpu()) {
        auto store = store_in(tensor.detach(), box);
        target.chunks.push_back({std::move(box), {nullptr, {}, std::move(store)}});
        continue;
      }
      const bool is_plain = !tensor.is_conj() && !tensor.is_neg();
      at::Tensor memory =
          is_plain ? tensor : at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()));
      if (!is_plain) staged_.emplace_back(tensor.detach(), memory);
      target.chunks.push_back(
          {std::move(box), {static_cast<std::uint8_t*>(memory.data_ptr()), memory.strides().vec()}});
      kept_.push_back(std::move(memory));
    }
    targets_.push_back({std::move(one.name), std::move(target)});
  }

  // Returns how elements are stored in a tensor on a device, which has the elements of `box`.
  decltype(checkpoint::TargetMemory::store) store_in(const at::Tensor& tensor, const Box& box) {
    return [tensor, box, staging = stagings_.of(tensor.device())](
               BoxView part, const std::function<void(std::uint8_t * row_major)>& fill) {
      staging->write(box_view(tensor, box, part), fill);
    };
  }

  DeviceStagings stagings_;  // when it is destroyed, all elements are there
  checkpoint::Targets targets_;
  std::map<std::string, Path> object_paths_;
  std::vector<std::pair<at::Tensor, at::Tensor>> staged_;  // destination on CPU, and the memory that it is loaded to
  std::vector<at::Tensor> kept_;
};

// Throws Error(invalid_argument) on all ranks unless the ranks of each node group pass the same one. Other ranks would
// wait in it for a rank that does not.
void check_node_groups(const ProcessGroup& group, const ProcessGroup& node_group) {
  if (group.size() == 1) return;
  std::string mine;
  if (node_group.size() > 1) mine = fmt::format("{}", fmt::join(node_group.world_ranks(), " "));
  const std::vector<Bytes> all = group.all_gather_bytes(as_bytes(mine));
  for (std::size_t r = 0; r < all.size(); ++r) {
    std::istringstream members{std::string(as_text(all[r]))};
    for (int member = 0; members >> member;) {
      const auto found = std::find(group.world_ranks().begin(), group.world_ranks().end(), member);
      const auto place = static_cast<std::size_t>(found - group.world_ranks().begin());
      if (found != group.world_ranks().end() && all[place] == all[r]) continue;
      fail(
          ErrorCode::invalid_argument,
          "load: node_group of rank {} has the ranks [{}] of the world, that of rank {} [{}], expected the same on all "
          "of them",
          group.world_ranks()[r], as_text(all[r]), member,
          found == group.world_ranks().end() ? std::string_view("not loading") : as_text(all[place]));
    }
  }
}

// Loads into a state dict without Statefuls.
LoadReport load_values(StateDict& state, const Open& open, const ProcessGroup& group, const LoadOptions& options) {
  check_node_groups(group, options.node_group);
  ProcessGroupLink link(group, options.coordinator_rank);
  checkpoint::OpenOptions open_options;
  open_options.check_checksums = options.check_checksums;
  open_options.transforms = options.transforms;
  const std::shared_ptr<const Checkpoint> stored = open(link, open_options);
  const std::shared_ptr<const Checkpoint> checkpoint =
      options.map ? link.agree_on("apply the map", [&] { return options.map->apply(stored); }) : stored;
  const std::string step = fmt::format("load {}", checkpoint->path().string());
  std::optional<StateDict> allocated;
  StateLoader loader = link.agree_on(step, [&] {
    allocated = with_memory(state);
    return StateLoader(allocated ? *allocated : state, *checkpoint, group, options);
  });
  ProcessGroupLink node(options.node_group);
  checkpoint::ReadOptions load_options = options;
  if (node.size() > 1) load_options.share_reads_among = &node;
  checkpoint::ReadReport report = checkpoint::read_state(loader.targets(), checkpoint, link, load_options);
  link.agree_on(step, [&] { loader.finish(allocated ? *allocated : state, *checkpoint, report); });
  if (allocated) state = *std::move(allocated);
  return {report.wanted_bytes, report.read_bytes, std::move(report.missing)};
}

// `describe` adds what is loaded, which must be equal on all ranks.
LoadReport load_from(StateDict& state, const Open& open, const std::function<void(CallArguments&)>& describe,
                     const ProcessGroup& group, const LoadOptions& options) {
  bool has_stateful = false;
  group.check_call("load", [&](CallArguments& arguments) {
    describe(arguments);
    describe_coordinator(group, options.coordinator_rank, arguments);
    has_stateful = describe_stateful(state, arguments);
  });
  if (!has_stateful) return load_values(state, open, group, options);
  StateDict loaded = with_states(state, group, "load");
  LoadReport report = load_values(loaded, open, group, options);
  load_states(state, loaded, group);
  state = std::move(loaded);
  return report;
}

// Whether a name is one of `names` or begins with one of them and a dot, and notes which of them are in use.
class NameFilter {
 public:
  explicit NameFilter(const std::vector<std::string>* names) : names_(names) {
    if (names != nullptr) is_used_.resize(names->size());
  }
  bool selects(std::string_view name) {
    if (names_ == nullptr) return true;
    bool found = false;
    for (std::size_t i = 0; i < names_->size(); ++i) {
      const std::string& given = (*names_)[i];
      if (!name.starts_with(given) || (name.size() > given.size() && name[given.size()] != '.')) continue;
      found = is_used_[i] = true;
    }
    return found;
  }
  // Throws Error(not_found) if a given name selected nothing.
  void check_all_used(const std::filesystem::path& path) const {
    for (std::size_t i = 0; i < is_used_.size(); ++i) {
      if (is_used_[i]) continue;
      fail(ErrorCode::not_found, "load {}: the checkpoint has no '{}'", path.string(), printable((*names_)[i]));
    }
  }

 private:
  const std::vector<std::string>* names_;  // null to select all
  std::vector<bool> is_used_;
};

StateDict load_selected(const std::filesystem::path& path, NameFilter filter) {
  const std::shared_ptr<const Checkpoint> checkpoint = Checkpoint::open(path);
  struct Named {
    std::size_t position;
    std::string name;
    Path path;
  };
  std::vector<Named> order;
  StateDict flat;
  checkpoint::Targets targets;
  std::vector<std::size_t> objects;
  for (std::size_t i = 0; i < checkpoint->objects().size(); ++i) {
    if (filter.selects(checkpoint->objects()[i].name)) objects.push_back(i);
  }
  for (const checkpoint::TensorInfo& tensor : checkpoint->tensors()) {
    if (!filter.selects(tensor.name)) continue;
    at::Tensor made = at::empty(tensor.shape, at::TensorOptions().dtype(to_scalar_type(tensor.dtype)));
    targets.push_back({tensor.name, checkpoint::TargetTensor{
                                        tensor.dtype,
                                        tensor.shape,
                                        {{Box::full(tensor.shape),
                                          {static_cast<std::uint8_t*>(made.data_ptr()), made.strides().vec()}}}}});
    flat.insert_or_assign(tensor.name, std::move(made));
    order.push_back({tensor.position, tensor.name, tensor.path});
  }
  filter.check_all_used(path);
  checkpoint::read_state(targets, checkpoint);
  for (const std::size_t i : objects) {
    const checkpoint::ObjectInfo& object = checkpoint->objects()[i];
    flat.insert_or_assign(object.name, load_object(*checkpoint, i));
    order.push_back({object.position, object.name, object.path});
  }
  std::sort(order.begin(), order.end(), [](const Named& a, const Named& b) { return a.position < b.position; });
  StateDict state;
  for (const Named& one : order) {
    set_element(state, one.path.empty() ? Path{one.name} : one.path, std::move(flat.at(one.name)));
  }
  return state;
}

}  // namespace

LoadReport load(StateDict& state, const std::filesystem::path& path, const ProcessGroup& group,
                const LoadOptions& options) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) {
    return load(state, checkpoint::file_system_storage(path), group, options);
  }
  return load_from(
      state,
      [&](checkpoint::RankLink& link, const checkpoint::OpenOptions& open_options) {
        return link.agree_on(fmt::format("open {}", path.string()),
                             [&] { return Checkpoint::open(path, open_options); });
      },
      [&](CallArguments& arguments) { arguments.add("file", path.filename().string()); }, group, options);
}

LoadReport load(StateDict& state, const std::shared_ptr<checkpoint::Storage>& storage, const ProcessGroup& group,
                const LoadOptions& options) {
  return load_from(
      state,
      [&](checkpoint::RankLink& link, const checkpoint::OpenOptions& open_options) {
        return checkpoint::open_on_all_ranks(storage, link, open_options);
      },
      [&](CallArguments& arguments) { arguments.add("directory", last_name_of(storage)); }, group, options);
}

StateDict load_full(const std::filesystem::path& path) { return load_selected(path, NameFilter(nullptr)); }

StateDict load_full(const std::filesystem::path& path, const std::vector<std::string>& names) {
  return load_selected(path, NameFilter(&names));
}

}  // namespace tessera
