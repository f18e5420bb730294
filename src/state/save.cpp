#include "tessera/state/save.h"

#include "state/local_state.h"
#include "state/process_group_link.h"
#include "tessera/base/error.h"

namespace tessera {

SaveReport save(const StateDict& state, const std::filesystem::path& directory, const ProcessGroup& group,
                const SaveOptions& options) {
  return save(state, checkpoint::file_system_storage(directory), group, options);
}

std::string last_name_of(const std::shared_ptr<checkpoint::Storage>& storage) {
  if (storage == nullptr) fail(ErrorCode::invalid_argument, "the storage is null, expected a storage");
  std::filesystem::path path(storage->name());
  if (!path.has_filename()) path = path.parent_path();
  return path.filename().string();
}

void describe_coordinator(const ProcessGroup& group, int rank, CallArguments& arguments) {
  if (rank < 0 || rank >= group.size()) {
    fail(ErrorCode::invalid_argument, "coordinator_rank is {}, expected a rank of the group, 0 to {}", rank,
         group.size() - 1);
  }
  arguments.add("coordinator_rank", rank);
}

void describe_save(const std::shared_ptr<checkpoint::Storage>& storage, const ProcessGroup& group,
                   const SaveOptions& options, CallArguments& arguments) {
  describe_coordinator(group, options.coordinator_rank, arguments);
  arguments.add("directory", last_name_of(storage))
      .add("format", static_cast<int>(options.format))
      .add("dialect", static_cast<int>(options.dialect))
      .add("overwrite", options.overwrite)
      .add("flatten_state_dict", options.flatten_state_dict)
      .add("flatten_sharded_tensors", options.flatten_sharded_tensors);
  for (const checkpoint::TransformPtr& transform : options.transforms) {
    if (transform == nullptr) fail(ErrorCode::invalid_argument, "a transform is null, expected a transform");
    arguments.add("transform", transform->descriptor());
  }
}

SaveReport save(const StateDict& state, const std::shared_ptr<checkpoint::Storage>& storage, const ProcessGroup& group,
                const SaveOptions& options) {
  const checkpoint::FlatState local = convert_on_all_ranks(
      group, "save", state, [&](CallArguments& arguments) { describe_save(storage, group, options, arguments); },
      [&](const StateDict& values) { return local_state(values, group, options); });
  ProcessGroupLink link(group, options.coordinator_rank);
  return checkpoint::write_state(local, storage, link, options);
}

}  // namespace tessera
