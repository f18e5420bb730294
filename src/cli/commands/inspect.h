#pragma once
// The outputs of `tessera inspect`: text, JSON, and sizes by prefix.

#include <optional>
#include <string>
#include <vector>

#include "cli/session.h"
#include "cli/text/names.h"
#include "tessera/checkpoint/inspect/size_tree.h"
#include "tessera/checkpoint/manage/run_directory.h"

namespace tessera::cli {

struct ShownObject {
  std::string type;
  std::string repr;
  std::string json;                   // the value as JSON; "null" if it is opaque
  std::optional<std::string> opaque;  // the reason
};

// Loads an object. One that cannot be read is opaque, with the error as the reason.
ShownObject show_object(const checkpoint::Checkpoint& checkpoint, std::size_t object);

// Where the elements of a chunk are stored, and their strides unless they are row-major.
struct Place : checkpoint::StoredRange {
  std::vector<std::int64_t> strides;
};
// Reads the place from the file. If that fails, returns the range that the metadata gives.
Place place_of(const checkpoint::Checkpoint& checkpoint, std::size_t tensor, std::size_t chunk);

void print_overview(Session& session, const checkpoint::Checkpoint& checkpoint);
void print_details(Session& session, const checkpoint::Checkpoint& checkpoint, const NamedItems& items);
void print_json(Session& session, const checkpoint::Checkpoint& checkpoint, const NamedItems& items);

// --tree: each prefix below the one that contains it, the largest first.
void print_size_tree(Session& session, const checkpoint::SizeNode& root);
void print_size_tree_json(Session& session, const checkpoint::SizeNode& root);
// --du: a list of all prefixes, the largest first.
void print_size_list(Session& session, const checkpoint::SizeNode& root);
// {"bytes", "tensors", "objects", "prefixes": [{"prefix", "bytes", "tensors", "objects"}]}
void print_size_list_json(Session& session, const checkpoint::SizeNode& root);
void print_run(Session& session, const checkpoint::RunDirectory& run);
// Prints that the directory of a checkpoint has steps in it too, if it does.
void print_steps_note(Session& session, const std::string& directory);

}  // namespace tessera::cli
