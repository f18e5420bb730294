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
  std::int64_t depth = 0;
  bool json = false, tree = false, du = false;
};

constexpr std::size_t kListDepth = 2;

void print_sizes(const Flags& flags, Session& session, const checkpoint::Checkpoint& checkpoint,
                 const NamedItems& items) {
  const std::size_t depth = flags.depth != 0 ? static_cast<std::size_t>(flags.depth)
                            : flags.du       ? kListDepth
                                             : checkpoint::kMaxSizeTreeDepth;
  const checkpoint::SizeNode root = checkpoint::size_tree(checkpoint, items.tensors, items.objects, depth);
  if (flags.json) {
    (flags.du ? print_size_list_json : print_size_tree_json)(session, root);
  } else {
    (flags.du ? print_size_list : print_size_tree)(session, root);
  }
}

ExitStatus inspect(const Flags& flags, Session& session) {
  if (flags.depth != 0 && !flags.tree && !flags.du) throw UsageError("--depth is for --tree and --du");
  const auto opened = session.open(flags.path);
  const NamedItems items = find_names(*opened, flags.names);
  if (flags.tree || flags.du) {
    print_sizes(flags, session, *opened, items);
  } else if (flags.json) {
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
  return {
      .name = "inspect",
      .summary = "Show the contents of a checkpoint.",
      .details =
          "Without names, prints tables of the tensors, objects and files. With names, prints every chunk of "
          "these tensors, with its file and byte offset, and the values of these objects. --tree and --du add up the "
          "sizes of tensors by prefix: keys of nested state dicts, and the parts of names between dots.",
      .examples = {"tessera inspect step-1000", "tessera inspect step-1000 'model.layers.0.*'",
                   "tessera inspect step-1000 --json | jq '.tensors | keys'",
                   "tessera inspect step-1000 --du --depth 3"},
      .options = {checkpoint_argument("CKPT", flags->path),
                  {.name = "FQN",
                   .help = "Names or globs of tensors and objects",
                   .target = &flags->names,
                   .positional = true},
                  {.name = "tree",
                   .help = "Print the tree of prefixes with the bytes of their tensors, the largest first",
                   .target = &flags->tree},
                  {.name = "du",
                   .help = "Print a list of prefixes with the bytes of their tensors, the largest first",
                   .target = &flags->du,
                   .conflicts = "tree"},
                  {.name = "depth",
                   .value_name = "N",
                   .help = "Levels of --tree and --du",
                   .target = &flags->depth,
                   .default_text = "2 for --du, all for --tree",
                   .range = Range{1, 64}},
                  json_option(flags->json)},
      .run = [flags](Session& session) { return inspect(*flags, session); }};
}

}  // namespace tessera::cli
