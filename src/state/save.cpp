#include "tessera/state/save.h"

#include "state/local_state.h"
#include "state/process_group_link.h"

namespace tessera {

SaveReport save(const StateDict& state, const std::filesystem::path& directory, const ProcessGroup& group,
                const SaveOptions& options) {
  return save(state, checkpoint::file_system_storage(directory), group, options);
}

SaveReport save(const StateDict& state, const std::shared_ptr<checkpoint::Storage>& storage, const ProcessGroup& group,
                const SaveOptions& options) {
  const checkpoint::FlatState local = group.agree_on("save", [&] { return local_state(state, group, options); });
  ProcessGroupLink link(group);
  return checkpoint::write_state(local, storage, link, options);
}

}  // namespace tessera
