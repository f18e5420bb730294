#include "cli/commands/inspect.h"

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "cli/text/json_text.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/manage/run_directory.h"
#include "tessera/checkpoint/report_json.h"
#include "tessera/format/python_value.h"

namespace tessera::cli {
namespace {

struct InspectFlags {
  std::string path;
  std::vector<std::string> names;
  std::int64_t depth = 0, jobs = 0;
  bool json = false, tree = false, du = false, steps = false, verify = false, quiet = false, all_warnings = false;
};

constexpr std::size_t kListDepth = 2;

void print_sizes(const InspectFlags& flags, Session& session, const checkpoint::Checkpoint& checkpoint,
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

// Lists the steps of a run's directory. If all data is verified, the answer is no if a step is damaged that seemed to
// be complete.
ExitStatus inspect_run(const InspectFlags& flags, Session& session) {
  checkpoint::RunDirectory run = checkpoint::list_run(flags.path, &session.cancellation);
  std::size_t damaged = 0;
  if (flags.verify) {
    checkpoint::VerifyOptions options;
    options.jobs = static_cast<std::size_t>(flags.jobs);
    options.progress = session.progress_unless(flags.quiet);
    options.cancellation = &session.cancellation;
    damaged = checkpoint::verify_steps(run, options);
    session.progress.end();
  }
  if (flags.json) {
    session.out.print("{}\n", json_text(checkpoint::report_json(run), 2));
  } else {
    print_run(session, run);
  }
  return damaged == 0 ? kYes : kNo;
}

ExitStatus inspect(const InspectFlags& flags, Session& session) {
  const bool shows_sizes = flags.tree || flags.du;
  if (flags.depth != 0 && !shows_sizes) throw UsageError("--depth is for --tree and --du");
  if (flags.steps || (flags.names.empty() && !shows_sizes && checkpoint::is_run_directory(flags.path))) {
    if (!flags.names.empty()) throw UsageError("--steps takes no names, expected the directory of a run alone");
    if (shows_sizes) throw UsageError("--tree and --du are for a checkpoint, expected no --steps");
    return inspect_run(flags, session);
  }
  if (flags.verify) throw UsageError("--verify is for the directory of a run; 'tessera verify' verifies a checkpoint");
  const auto opened = session.open(flags.path, false, flags.all_warnings);
  const NamedItems items = find_names(*opened, flags.names);
  if (shows_sizes) {
    print_sizes(flags, session, *opened, items);
  } else if (flags.json) {
    print_json(session, *opened, items);
  } else if (flags.names.empty()) {
    print_overview(session, *opened);
    print_steps_note(session, flags.path);
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
  const auto flags = std::make_shared<InspectFlags>();
  return {
      .name = "inspect",
      .summary = "Show the contents of a checkpoint, or list the steps of a run.",
      .details =
          "Without names, prints tables of the tensors, objects and files. With names, prints every chunk of "
          "these tensors, with its file and byte offset, and the values of these objects. --tree and --du add up the "
          "sizes of tensors by prefix: keys of nested state dicts, and the parts of names between dots. Of the "
          "directory of a run, lists its steps: when each was written, by how many ranks, its size, and whether "
          "it is complete. "
          "With --verify, the exit status is 1 if a step is damaged that is complete otherwise.",
      .examples = {"tessera inspect step-1000", "tessera inspect step-1000 'model.layers.0.*'",
                   "tessera inspect step-1000 --du --depth 3", "tessera ls checkpoints",
                   "tessera inspect step-1000 --json | jq '.tensors | keys'"},
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
                  {.name = "steps",
                   .help = "List the steps in a directory that has a checkpoint of its own too",
                   .target = &flags->steps},
                  {.name = "verify",
                   .help = "Of the directory of a run: read all data and compare every checksum",
                   .target = &flags->verify},
                  jobs_option(flags->jobs),
                  quiet_option(flags->quiet),
                  all_warnings_option(flags->all_warnings),
                  json_option(flags->json)},
      .alias = "ls",
      .run = [flags](Session& session) { return inspect(*flags, session); }};
}

}  // namespace tessera::cli
