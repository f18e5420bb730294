#include "cli/commands/inspect.h"

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "cli/text/json_text.h"
#include "tessera/base/error.h"
#include "tessera/format/python_value.h"

namespace tessera::cli {
namespace {

struct Flags {
  std::string path;
  std::vector<std::string> names;
  bool json = false;
};

ExitStatus inspect(const Flags& flags, Session& session) {
  const auto opened = session.open(flags.path);
  const NamedItems items = find_names(*opened, flags.names);
  if (flags.json) {
    print_json(session, *opened, items);
  } else if (flags.names.empty()) {
    print_overview(session, *opened);
  } else {
    print_details(session, *opened, items);
  }
  return kYes;
}

}  // namespace

ShownObject show_object(const checkpoint::Checkpoint& checkpoint, std::size_t object) {
  ShownObject shown;
  shown.json = "null";
  try {
    const checkpoint::ObjectValue loaded = checkpoint.load_object(object);
    shown.type = pickle::type_name(loaded.value);
    shown.repr = pickle::repr(loaded.value);
    shown.opaque = pickle::opaque_reason(loaded.value);
    if (!shown.opaque) shown.json = json_text(pickle::to_json(loaded.value));
  } catch (const Error& error) {
    shown.type = "unknown";
    shown.opaque = "cannot be read: " + one_line(error.what());
    shown.repr = "<" + *shown.opaque + ">";
  }
  return shown;
}

Place place_of(const checkpoint::Checkpoint& checkpoint, std::size_t tensor, std::size_t chunk) {
  try {
    checkpoint::Extent extent = checkpoint.locate(tensor, chunk);
    if (extent.file >= checkpoint.files().size()) return {checkpoint.tensors()[tensor].stored[chunk], {}};
    return {{extent.file, extent.offset_bytes, extent.length_bytes}, std::move(extent.strides)};
  } catch (const Error&) {
    return {checkpoint.tensors()[tensor].stored[chunk], {}};
  }
}

Command inspect_command() {
  const auto flags = std::make_shared<Flags>();
  return {.name = "inspect",
          .summary = "Show the contents of a checkpoint.",
          .details =
              "Without names, prints tables of the tensors, objects and files. With names, prints every chunk of "
              "these tensors, with its file and byte offset, and the values of these objects.",
          .examples = {"tessera inspect step-1000", "tessera inspect step-1000 'model.layers.0.*'",
                       "tessera inspect step-1000 --json | jq '.tensors | keys'"},
          .options = {checkpoint_argument("CKPT", flags->path),
                      {.name = "FQN",
                       .help = "Names or globs of tensors and objects",
                       .target = &flags->names,
                       .positional = true},
                      json_option(flags->json)},
          .run = [flags](Session& session) { return inspect(*flags, session); }};
}

}  // namespace tessera::cli
