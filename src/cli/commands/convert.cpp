#include "tessera/checkpoint/convert.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>  // for IsMember, which not every version has in the same header

#include <chrono>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/command.h"
#include "cli/json_text.h"
#include "cli/text_table.h"
#include "tessera/base/bytes.h"
#include "tessera/base/dtype.h"

namespace tessera::cli {
namespace {

using checkpoint::ConvertReport;
using checkpoint::SourceKind;

// What convert and reshard have in common.
struct Flags {
  std::string source, destination;
  std::string dtype, max_shard_size;
  checkpoint::Selection selection;
  std::size_t jobs = 0;
  bool dry_run = false, json = false;
};

struct ConvertFlags : Flags {
  std::string to;
};

struct ReshardFlags : Flags {
  std::int64_t ranks = 0, dim = 0;
  std::string like;
};

void add_common_flags(CLI::App& app, Flags& flags) {
  app.add_option("SRC", flags.source, "The checkpoint")->required();
  app.add_option("DST", flags.destination, "Where to write; must not exist")->required();
  add_selection_flags(app, flags.selection);
  app.add_option("--dtype", flags.dtype, "Make floating-point tensors this type, for example bfloat16")->type_name("D");
  app.add_option("--max-shard-size", flags.max_shard_size, "Largest file: 5GB, 500MB, 2GiB or bytes")
      ->type_name("SIZE");
  add_jobs_flag(app, flags.jobs);
  app.add_flag("--dry-run", flags.dry_run, "Say what would be written, and write nothing");
  add_json_flag(app, flags.json);
}

SourceKind target_kind(const ConvertFlags& flags) {
  if (flags.to == "dcp") return SourceKind::dcp;
  if (flags.to == "safetensors") return SourceKind::safetensors;
  if (flags.to == "torch") return SourceKind::torch;
  const std::string_view destination = flags.destination;
  if (destination.ends_with(".safetensors")) return SourceKind::safetensors;
  for (const std::string_view ending : {".pt", ".pth", ".bin"}) {
    if (destination.ends_with(ending)) return SourceKind::torch;
  }
  throw UsageError(fmt::format("--to is required: '{}' does not tell the format by its ending", destination));
}

// What the conversion warns of, which any of its threads may do.
class Warnings {
 public:
  void add(const std::string& text) {
    const std::lock_guard lock(mutex_);
    texts_.push_back(text);
  }
  void print() const {
    for (const std::string& text : texts_) print_warning(text);
  }
  const std::vector<std::string>& texts() const { return texts_; }

 private:
  std::mutex mutex_;
  std::vector<std::string> texts_;
};

void set_common_options(const Flags& flags, Session& session, Warnings& warnings, checkpoint::ConvertOptions& options) {
  options.selection = flags.selection;
  if (!flags.dtype.empty()) {
    options.dtype = find_dtype(flags.dtype);
    if (!options.dtype) throw UsageError(fmt::format("--dtype: PyTorch has no dtype '{}'", flags.dtype));
  }
  if (!flags.max_shard_size.empty()) options.max_shard_bytes = parse_size(flags.max_shard_size);
  options.jobs = flags.jobs;
  options.dry_run = flags.dry_run;
  options.progress = &session.progress;
  options.cancellation = &session.cancellation;
  options.warn = [&warnings](const std::string& text) { warnings.add(text); };
}

void print_for_people(Session& session, const Flags& flags, const ConvertReport& report, double seconds) {
  std::uint64_t file_bytes = 0;
  for (const ConvertReport::OutputFile& file : report.files) file_bytes += file.size_bytes;
  if (flags.dry_run) {
    TextTable table({{"BYTES", TextTable::Align::right},
                     {"PIECES", TextTable::Align::right},
                     {"FILE", TextTable::Align::left, 20, true}});
    for (const ConvertReport::OutputFile& file : report.files) {
      table.add({format_bytes(file.size_bytes), fmt::to_string(file.tensors), one_line(file.name)});
    }
    table.print(session.out);
  }
  std::string said =
      fmt::format("{} {}: {} ({}), {}, {} of {}", flags.dry_run ? "would write" : "wrote", one_line(flags.destination),
                  counted(report.tensors, "tensor"), format_bytes(report.tensor_bytes),
                  counted(report.objects, "object"), counted(report.files.size(), "file"), format_bytes(file_bytes));
  if (!flags.dry_run) {
    said += fmt::format("; {:.2f} s", seconds);
    if (seconds >= 0.01) {
      said += fmt::format(", {}/s", format_bytes(static_cast<std::uint64_t>(double(report.tensor_bytes) / seconds)));
    }
  }
  session.out.print("{}\n", wrap(said, session.out.columns()));
}

void print_as_json(Session& session, const Flags& flags, const ConvertReport& report, const Warnings& warnings,
                   double seconds) {
  using Json = nlohmann::ordered_json;
  Json files = Json::array();
  for (const ConvertReport::OutputFile& file : report.files) {
    files.push_back({{"name", file.name}, {"bytes", file.size_bytes}, {"tensors", file.tensors}});
  }
  const Json json = {{"destination", flags.destination},    {"dry_run", flags.dry_run},
                     {"tensors", report.tensors},           {"objects", report.objects},
                     {"tensor_bytes", report.tensor_bytes}, {"files", files},
                     {"warnings", warnings.texts()},        {"seconds", seconds}};
  session.out.print("{}\n", json_text(json, 2));
}

// Runs `work`, prints what it warned of, also where it failed, and then what it did.
template <typename Work>
ExitStatus run_and_report(const Flags& flags, Session& session, const Warnings& warnings, const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  ConvertReport report;
  try {
    report = work();
  } catch (...) {
    session.progress.end();
    warnings.print();
    throw;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  session.progress.end();
  warnings.print();
  if (flags.json) {
    print_as_json(session, flags, report, warnings, seconds);
  } else {
    print_for_people(session, flags, report, seconds);
  }
  return kYes;
}

ExitStatus convert(const ConvertFlags& flags, Session& session) {
  checkpoint::ConvertOptions options;
  Warnings warnings;
  options.to = target_kind(flags);
  set_common_options(flags, session, warnings, options);
  const auto source = session.open(flags.source);
  check_selection(flags.selection, {source.get()});
  return run_and_report(flags, session, warnings,
                        [&] { return checkpoint::convert(source, flags.destination, options); });
}

ExitStatus reshard(const ReshardFlags& flags, Session& session) {
  checkpoint::ReshardOptions options;
  Warnings warnings;
  if (flags.ranks == 0 && flags.like.empty()) throw UsageError("either --ranks or --like is required");
  set_common_options(flags, session, warnings, options);
  const auto source = session.open(flags.source);
  check_selection(flags.selection, {source.get()});
  options.dim = flags.dim;
  if (flags.like.empty()) {
    options.ranks = flags.ranks;
  } else {
    options.like = session.open(flags.like);
  }
  return run_and_report(flags, session, warnings,
                        [&] { return checkpoint::reshard(source, flags.destination, options); });
}

}  // namespace

Command add_convert(CLI::App& parent) {
  auto flags = std::make_shared<ConvertFlags>();
  CLI::App* app = parent.add_subcommand("convert", "Write a checkpoint in another format");
  app->add_option("--to", flags->to,
                  "dcp, safetensors or torch; may be left out where DST ends in\n"
                  ".safetensors, .pt, .pth or .bin")
      ->check(CLI::IsMember({"dcp", "safetensors", "torch"}))
      ->type_name("FORMAT");
  add_common_flags(*app, *flags);
  app->footer(
      "Streams, in memory that does not grow with the state. DST appears whole or not at all.\n\n"
      "Examples:\n"
      "  tessera convert step-1000 model.safetensors --select 'model.*' --dtype bfloat16\n"
      "  tessera convert step-1000 model/ --to safetensors --max-shard-size 5GB\n"
      "  tessera convert model.pt step-0 --to dcp");
  return {app, [flags](Session& session) { return convert(*flags, session); }};
}

Command add_reshard(CLI::App& parent) {
  auto flags = std::make_shared<ReshardFlags>();
  CLI::App* app = parent.add_subcommand("reshard", "Write a checkpoint laid out for another number of ranks");
  CLI::Option* ranks = app->add_option("--ranks", flags->ranks, "Ranks to lay it out for")
                           ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20))
                           ->type_name("N");
  CLI::Option* dim =
      app->add_option("--dim", flags->dim, "Dimension to cut (default: 0); of tensors without it the last")
          ->type_name("D");
  app->add_option("--like", flags->like, "Take ranks and boxes from this checkpoint, in place of --ranks and --dim")
      ->type_name("OTHER")
      ->excludes(ranks)
      ->excludes(dim);
  add_common_flags(*app, *flags);
  app->footer(
      "Writes a distributed checkpoint (DCP) of the same state.\n\n"
      "Examples:\n"
      "  tessera reshard step-1000 step-1000-for-16 --ranks 16\n"
      "  tessera reshard model.safetensors step-0 --like step-1000");
  return {app, [flags](Session& session) { return reshard(*flags, session); }};
}

}  // namespace tessera::cli
