#include "cli/commands/inspect.h"

#include <fmt/format.h>

#include <memory>
#include <utility>

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
  try {
    const checkpoint::ObjectValue loaded = checkpoint.load_object(object);
    shown.type = pickle::type_name(loaded.value);
    shown.repr = pickle::repr(loaded.value);
    shown.opaque = pickle::opaque_reason(loaded.value);
    if (!shown.opaque) shown.value = pickle::to_json(loaded.value);
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
    return {{extent.file, extent.offset_bytes, extent.length_bytes}, std::move(extent.strides)};
  } catch (const Error&) {
    return {checkpoint.tensors()[tensor].stored[chunk], {}};
  }
}

Command add_inspect(CLI::App& parent) {
  auto flags = std::make_shared<Flags>();
  CLI::App* app = parent.add_subcommand("inspect", "Show what is in a checkpoint");
  app->add_option("CKPT", flags->path, "A directory of a distributed checkpoint or of safetensors, or one file")
      ->required();
  // Without extra arguments CLI11 doesn't take an item apart that stands in brackets, as a glob may. It then stores one
  // name or all, by its version, and leaves the rest over.
  const CLI::Option* names = app->add_option("FQN", "Only these names or globs, with every chunk of theirs")
                                 ->expected(1, -1)
                                 ->allow_extra_args(false);
  app->allow_extras();
  add_json_flag(*app, flags->json);
  app->footer(
      "Examples:\n"
      "  tessera inspect step-1000\n"
      "  tessera inspect step-1000 'model.layers.0.*'\n"
      "  tessera inspect step-1000 --json | jq '.tensors | keys'");
  return {app, [app, names, flags](Session& session) {
            flags->names = names->results();
            for (const std::string& name : app->remaining()) flags->names.push_back(name);
            for (const std::string& name : flags->names) {
              if (name.starts_with("-")) throw UsageError(fmt::format("unknown flag {}", name));
            }
            return inspect(*flags, session);
          }};
}

}  // namespace tessera::cli
