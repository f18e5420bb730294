#include "tessera/state/same_keys.h"

#include <set>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/state/flatten.h"
#include "tessera/state/object_archive.h"

namespace tessera {

void check_same_keys(const StateDict& state_dict, const ProcessGroup& group) {
  constexpr std::size_t kListed = 20;
  Bytes names;
  group.check_call("check that all ranks have the same keys", [&](CallArguments&) {
    List list;
    for (const auto& [name, path] : flatten_state_dict(state_dict).mapping) list.push_back(name);
    names = save_object(list);
  });
  std::vector<std::set<std::string>> of_ranks;
  std::set<std::string> all;
  for (const Bytes& one : group.all_gather_bytes(names)) {
    std::set<std::string>& mine = of_ranks.emplace_back();
    const Value list = load_object(one, "names of a rank");
    for (const Value& name : list.get<List>()) mine.insert(name.get<std::string>());
    all.insert(mine.begin(), mine.end());
  }
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
    std::string lacking;
    std::size_t count = 0;
    for (const std::string& name : all) {
      if (of_ranks[rank].contains(name) || ++count > kListed) continue;
      lacking += fmt::format("{}'{}'", lacking.empty() ? "" : ", ", printable(name));
    }
    if (count == 0) continue;
    if (count > kListed) lacking += fmt::format(" and {} more", count - kListed);
    fail(ErrorCode::invalid_argument,
         "check that all ranks have the same keys: rank {} lacks {}, which other ranks have, expected the same on all",
         rank, lacking);
  }
}

}  // namespace tessera
