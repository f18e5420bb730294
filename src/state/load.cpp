#include "tessera/state/load.h"

#include <ATen/ops/empty.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <future>
#include <map>
#include <memory>
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
#include "tessera/base/function_ref.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/state/object_archive.h"
#include "tessera/tensor/internal/box_view.h"
#include "tessera/tensor/internal/bump_version.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

namespace {

using checkpoint::Checkpoint;

// What a rank does alone to open a checkpoint, on any thread, after what ranks do together.
struct Opening {
  std::string step;
  std::function<std::shared_ptr<const Checkpoint>()> open;
};
// What ranks do together: throws on all of them or on none.
using PrepareToOpen = FunctionRef<Opening(checkpoint::RankLink& link, const checkpoint::OpenOptions& options)>;

class StateLoader {
 public:
  // `state` must not change while this exists, except for the values of objects.
  StateLoader(StateDict& state, TraversalRules rules, const ProcessGroup& group, const LoadOptions& options)
      : state_(state),
        how_{options.flatten_state_dict, rules, options.flatten_sharded_tensors},
        stagings_(options.staging_bytes) {
    for_each_flat_value(state, how_, group, [&](std::string name, const Path&, const Value& value) {
      try {
        add(name, value);
      } catch (const Error& error) {
        fail(error.code(), "load '{}': {}", printable(name), error.what());
      }
    });
    require_unique_names(targets_);
  }

  const checkpoint::Targets& targets() const { return targets_; }

  // Values to put into the state, each with its place there.
  using Objects = std::vector<std::pair<Value*, Value>>;

  // Copies tensors that were loaded to temporary memory, and returns the objects.
  Objects finish_tensors_and_read_objects(const Checkpoint& checkpoint, const checkpoint::ReadReport& report) {
    for (const at::Tensor& loaded : kept_) bump_version(loaded);
    for (auto& [tensor, loaded] : staged_) tensor.copy_(loaded);
    Objects objects;
    for (const auto& [name, object] : report.objects) {
      objects.emplace_back(objects_.at(name),
                           load_object(object, [&](std::uint32_t file) { return checkpoint.open_file(file); }));
    }
    return objects;
  }

  // Puts the values that `original`, of which the state is a copy, has under these names into the state.
  void restore(const std::vector<std::string>& names, StateDict& original) {
    const auto places = places_of(state_), originals = places_of(original);
    for (const std::string& name : names) *places.at(name) = *originals.at(name);
  }

 private:
  // Returns the place of each value of a state by its flat name, for writing.
  std::map<std::string, Value*> places_of(StateDict& state) const {
    std::map<std::string, Value*> places;
    const Flattening how = {how_.state_dict, how_.rules, false};  // conversion does not change names
    for_each_flat_value(state, how, {}, [&](std::string name, const Path&, const Value& value) {
      places.emplace(std::move(name), const_cast<Value*>(&value));
    });
    return places;
  }

  // Takes the name, unless it throws. An object must be a value of the state itself.
  void add(std::string& name, const Value& value) {
    std::optional<LocalTensor> local = attached_tensor_of(value);
    if (!local) {
      objects_.emplace(name, const_cast<Value*>(&value));
      targets_.push_back({std::move(name), checkpoint::TargetObject{}});
      return;
    }
    const DType dtype = local->properties ? local->properties->dtype : TensorProperties().dtype;
    checkpoint::TargetTensor target{dtype, std::move(local->shape), {}};
    target.chunks.reserve(local->chunks.size());
    for (auto& [box, tensor] : local->chunks) {
      require_memory(tensor);
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
    targets_.push_back({std::move(name), std::move(target)});
  }

  // Returns how elements are stored in a tensor on a device, which has the elements of `box`.
  decltype(checkpoint::TargetMemory::store) store_in(const at::Tensor& tensor, const Box& box) {
    return [tensor, box, staging = stagings_.of(tensor.device())](BoxView part,
                                                                  FunctionRef<void(std::uint8_t * row_major)> fill) {
      staging->write(box_view(tensor, box, part), fill);
    };
  }

  StateDict& state_;
  Flattening how_;
  DeviceStagings stagings_;  // when it is destroyed, all elements are there
  checkpoint::Targets targets_;
  std::map<std::string, Value*> objects_;                  // in the state
  std::vector<std::pair<at::Tensor, at::Tensor>> staged_;  // destination on CPU, and the memory that it is loaded to
  std::vector<at::Tensor> kept_;
};

// Returns whether the checkpoint has names of `state` that only the older rules of traversal give. The names in a
// torch.save file always follow the newer rules, which gave those of `targets`.
bool has_names_until_2_3(const StateDict& state, const checkpoint::Targets& targets, const Checkpoint& checkpoint) {
  if (checkpoint.kind() == checkpoint::SourceKind::torch) return false;
  const auto is_stored = [&](const std::string& name) {
    return checkpoint.find_tensor(name) || checkpoint.find_object(name);
  };
  const auto found =
      static_cast<std::size_t>(std::ranges::count_if(targets, is_stored, &checkpoint::TargetEntry::name));
  if (found == checkpoint.tensors().size() + checkpoint.objects().size()) return false;
  TextSet newer;
  for_each_flat_value(state, {}, {},
                      [&](std::string name, const Path&, const Value&) { newer.insert(std::move(name)); });
  bool found_older = false;
  for_each_flat_value(state, {.rules = TraversalRules::until_2_3}, {},
                      [&](const std::string& name, const Path&, const Value&) {
                        found_older = found_older || (!newer.contains(name) && is_stored(name));
                      });
  return found_older;
}

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

// Opens the checkpoint in another thread, while this one flattens the state: of many small tensors, both take long.
// If the system has no thread left, opens it when it is asked for. Nothing keeps `open`, which has the metadata, after
// that.
std::future<std::shared_ptr<const Checkpoint>> begin_to_open(std::function<std::shared_ptr<const Checkpoint>()> open) {
  try {
    return std::async(std::launch::async, open);
  } catch (const std::system_error&) {
    return std::async(std::launch::deferred, open);
  }
}

// Loads into a state dict without Statefuls.
LoadReport load_values(StateDict& state, PrepareToOpen prepare, const ProcessGroup& group, const LoadOptions& options) {
  check_node_groups(group, options.node_group);
  ProcessGroupLink link(group, options.coordinator_rank);
  checkpoint::OpenOptions open_options;
  open_options.check_checksums = options.check_checksums;
  open_options.transforms = options.transforms;
  Opening opening = prepare(link, open_options);
  auto opened = begin_to_open(std::move(opening.open));
  std::optional<StateDict> allocated;
  std::unique_ptr<StateLoader> loader;
  const auto flatten_by = [&](TraversalRules rules) {
    loader = std::make_unique<StateLoader>(allocated ? *allocated : state, rules, group, options);
  };
  std::exception_ptr failure;
  try {
    allocated = with_memory(state);
    flatten_by(TraversalRules::since_2_4);
  } catch (...) {
    failure = std::current_exception();
  }
  const std::shared_ptr<const Checkpoint> stored =
      link.size() == 1 ? opened.get() : link.agree_on(opening.step, [&] { return opened.get(); });
  const std::shared_ptr<const Checkpoint> checkpoint =
      options.map ? link.agree_on("apply the map", [&] { return options.map->apply(stored); }) : stored;
  const std::string step = fmt::format("load {}", checkpoint->path().string());
  link.agree_on(step, [&] {
    if (failure) std::rethrow_exception(failure);
    if (!options.flatten_state_dict || !has_names_until_2_3(state, loader->targets(), *checkpoint)) return;
    flatten_by(TraversalRules::until_2_3);
  });
  ProcessGroupLink node(options.node_group);
  checkpoint::ReadOptions load_options = options;
  if (node.size() > 1) load_options.share_reads_among = &node;
  checkpoint::ReadReport report = checkpoint::read_state(loader->targets(), checkpoint, link, load_options);
  StateLoader::Objects objects =
      link.agree_on(step, [&] { return loader->finish_tensors_and_read_objects(*checkpoint, report); });
  for (auto& [place, value] : objects) *place = std::move(value);
  if (allocated) {
    loader->restore(report.missing, state);
    state = *std::move(allocated);
  }
  return {report.wanted_bytes, report.read_bytes, report.bytes_not_compared, std::move(report.missing)};
}

// `describe` adds what is loaded, which must be equal on all ranks.
LoadReport load_from(StateDict& state, PrepareToOpen prepare, FunctionRef<void(CallArguments&)> describe,
                     const ProcessGroup& group, const LoadOptions& options) {
  bool has_stateful = false;
  group.check_call("load", [&](CallArguments& arguments) {
    describe(arguments);
    describe_coordinator(group, options.coordinator_rank, arguments);
    has_stateful = describe_stateful(state, arguments);
  });
  if (!has_stateful) return load_values(state, prepare, group, options);
  StateDict loaded = with_states(state, group, "load");
  LoadReport report = load_values(loaded, prepare, group, options);
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
      fail(
          ErrorCode::not_found,
          "load {}: the checkpoint has no '{}', expected a saved name or one that others begin with; 'tessera inspect' "
          "lists them",
          path.string(), printable((*names_)[i]));
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
      [&](checkpoint::RankLink&, const checkpoint::OpenOptions& open_options) -> Opening {
        return {fmt::format("open {}", path.string()),
                [&path, open_options] { return Checkpoint::open(path, open_options); }};
      },
      [&](CallArguments& arguments) { arguments.add("file", path.filename().string()); }, group, options);
}

LoadReport load(StateDict& state, const std::shared_ptr<checkpoint::Storage>& storage, const ProcessGroup& group,
                const LoadOptions& options) {
  return load_from(
      state,
      [&](checkpoint::RankLink& link, const checkpoint::OpenOptions& open_options) -> Opening {
        return {fmt::format("open {}", storage->name()), checkpoint::prepare_to_open(storage, link, open_options)};
      },
      [&](CallArguments& arguments) { arguments.add("directory", last_name_of(storage)); }, group, options);
}

StateDict load_full(const std::filesystem::path& path) { return load_selected(path, NameFilter(nullptr)); }

StateDict load_full(const std::filesystem::path& path, const std::vector<std::string>& names) {
  return load_selected(path, NameFilter(&names));
}

}  // namespace tessera
