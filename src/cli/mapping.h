#pragma once
// The options that change names and shapes on the way: --map, --rename and what belongs to them.

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/session.h"
#include "tessera/checkpoint/tensor_map.h"

namespace tessera::cli {

struct MapFlags {
  std::vector<std::string> maps, renames, set;
  bool invert = false, check = false;
  bool any() const { return !maps.empty() || !renames.empty(); }
};

void add_map_options(MapFlags& flags, std::vector<Option>& options);

// Returns what the options specify; nothing if they specify no map. `config` is the config.json of a model, or empty.
// Throws UsageError for options that need others, and for invalid values of --rename and --set.
std::optional<checkpoint::TensorMap> map_of(const MapFlags& flags, const std::filesystem::path& config);

// Prints what prevents the map from being applied, and returns whether nothing does.
bool print_check(Session& session, const checkpoint::TensorMap& map,
                 const std::shared_ptr<const checkpoint::Checkpoint>& source, bool json);

}  // namespace tessera::cli
