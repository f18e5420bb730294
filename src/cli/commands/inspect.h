#pragma once
// What `tessera inspect` shows, for people and as JSON.

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/names.h"

namespace tessera::cli {

struct ShownObject {
  std::string type;
  std::string repr;
  nlohmann::ordered_json value;       // null where it is opaque
  std::optional<std::string> opaque;  // why
};

// Loads an object; one that can't be read is opaque and says why.
ShownObject show_object(const checkpoint::Checkpoint& checkpoint, std::size_t object);

// Where the elements of a chunk lie, and their strides where they aren't row-major; where that can't be found out, the
// range that the metadata gives.
struct Place : checkpoint::StoredRange {
  std::vector<std::int64_t> strides;
};
Place place_of(const checkpoint::Checkpoint& checkpoint, std::size_t tensor, std::size_t chunk);

void print_overview(Session& session, const checkpoint::Checkpoint& checkpoint);
void print_details(Session& session, const checkpoint::Checkpoint& checkpoint, const NamedItems& items);
void print_json(Session& session, const checkpoint::Checkpoint& checkpoint, const NamedItems& items);

}  // namespace tessera::cli
