#include "tessera/checkpoint/convert.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/mapping.h"
#include "cli/selection.h"
#include "cli/session.h"
#include "cli/text/dtype.h"
#include "cli/text/json_text.h"
#include "cli/text/size.h"
#include "cli/text/text_table.h"
#include "tessera/base/bytes.h"
#include "tessera/base/dtype.h"
#include "tessera/checkpoint/internal/shard_dim.h"
#include "tessera/checkpoint/report_json.h"

namespace tessera::cli {
namespace {

using checkpoint::ConvertReport;
using checkpoint::SourceKind;

// The options that convert and reshard share.
struct CommonFlags {
  std::string source, destination;
  std::string dtype, max_shard_size;
  checkpoint::Selection selection;
  std::int64_t jobs = 0;
  bool dry_run = false, json = false, no_checksums = false, expand = false;
  bool force = false, large = false, quiet = false, all_warnings = false;
  MapFlags map;
};

struct ConvertFlags : CommonFlags {
  std::string to, hf_config;
};

struct ReshardFlags : CommonFlags {
  std::int64_t ranks = 0, dim = 0;
  std::string like;
};

// Pieces of tensors are planned in memory, of which this many take some GB.
constexpr double kMaxPieces = 1e7;

void add_common_options(CommonFlags& flags, std::vector<Option>& options) {
  options.push_back(checkpoint_argument("SRC", flags.source));
  options.push_back(
      {.name = "DST",
       .help = "Directory or file to write; must not exist unless --force is given; not needed with --check",
       .target = &flags.destination,
       .positional = true,
       .is_path = true});
  options.push_back(select_option(flags.selection));
  options.push_back(exclude_option(flags.selection));
  options.push_back({.name = "dtype",
                     .value_name = "D",
                     .help = "Convert floating-point tensors to this type, for example bfloat16 or bf16",
                     .target = &flags.dtype});
  add_map_options(flags.map, options);
  options.push_back({.name = "max-shard-size",
                     .value_name = "SIZE",
                     .help = "Size limit of a file: 5GB, 500MB, 2GiB or a number of bytes",
                     .target = &flags.max_shard_size});
  options.push_back(jobs_option(flags.jobs));
  options.push_back(
      {.name = "dry-run", .help = "Print what would be written, and write nothing", .target = &flags.dry_run});
  options.push_back({.name = "force",
                     .help =
                         "Replace DST, a file or the directory of a checkpoint: the old one or the new one is there "
                         "at any instant",
                     .target = &flags.force});
  options.push_back({.name = "large",
                     .help =
                         "Write more than 10 million pieces of tensors, or more than the file system of DST has room "
                         "for",
                     .target = &flags.large});
  options.push_back(no_checksums_option(flags.no_checksums));
  options.push_back(expand_option(flags.expand));
  options.push_back(quiet_option(flags.quiet));
  options.push_back(all_warnings_option(flags.all_warnings));
  options.push_back(json_option(flags.json));
}

SourceKind target_kind(const ConvertFlags& flags) {
  if (flags.to == "dcp") return SourceKind::dcp;
  if (flags.to == "safetensors") return SourceKind::safetensors;
  if (flags.to == "torch") return SourceKind::torch;
  if (flags.to == "torch_checkpointing") return SourceKind::torch_checkpointing;
  const std::string_view destination = flags.destination;
  if (destination.ends_with(".safetensors")) return SourceKind::safetensors;
  for (const std::string_view ending : {".pt", ".pth", ".bin"}) {
    if (destination.ends_with(ending)) return SourceKind::torch;
  }
  throw UsageError(fmt::format(
      "--to is required: '{}' does not end in .safetensors, .pt, .pth or .bin, which name the format", destination));
}

// Collects the warnings of a conversion. Any of its threads may add one.
class Warnings {
 public:
  void add(const std::string& text) {
    const std::lock_guard lock(mutex_);
    texts_.push_back(text);
  }
  void print(bool all) const { print_warnings(texts_, all); }
  const std::vector<std::string>& texts() const { return texts_; }

 private:
  std::mutex mutex_;
  std::vector<std::string> texts_;
};

// A conversion for which there is no room would fail hours later. A file system that compresses may have more.
void check_room(const CommonFlags& flags, const ConvertReport& planned, Warnings& warnings) {
  std::error_code unknown;
  std::filesystem::path path = std::filesystem::absolute(flags.destination, unknown).lexically_normal();
  if (unknown) return;
  if (!path.has_filename()) path = path.parent_path();  // without the slash at its end
  const std::uint64_t room = std::filesystem::space(path.parent_path(), unknown).available;
  if (unknown || flags.large || planned.file_bytes() <= room) return;
  const std::string text =
      fmt::format("write {}: {} are needed, found {} free in its file system", one_line(flags.destination),
                  format_bytes(planned.file_bytes()), format_bytes(room));
  if (!flags.dry_run) fail(ErrorCode::io, "{}; --large begins all the same", text);
  warnings.add(text);
}

void set_common_options(const CommonFlags& flags, Session& session, Warnings& warnings,
                        checkpoint::ConvertOptions& options) {
  options.selection = flags.selection;
  if (!flags.dtype.empty()) options.dtype = parse_dtype("--dtype", flags.dtype);
  if (!flags.max_shard_size.empty()) options.max_shard_bytes = parse_size("--max-shard-size", flags.max_shard_size);
  options.jobs = static_cast<std::size_t>(flags.jobs);
  options.dry_run = flags.dry_run;
  options.expand = flags.expand;
  options.replace = flags.force;
  options.progress = session.progress_unless(flags.quiet);
  options.cancellation = &session.cancellation;
  options.warn = [&warnings](const std::string& text) { warnings.add(text); };
  options.before_writing = [&flags, &warnings](const ConvertReport& planned) { check_room(flags, planned, warnings); };
}

void print_for_people(Session& session, const CommonFlags& flags, const ConvertReport& report, double seconds) {
  if (flags.dry_run) {
    TextTable table({{"BYTES", TextTable::Align::right},
                     {"PIECES", TextTable::Align::right},
                     {"FILE", TextTable::Align::left, 20, true}});
    for (const ConvertReport::OutputFile& file : report.files) {
      table.add({format_bytes(file.size_bytes), fmt::to_string(file.tensors), one_line(file.name)});
    }
    table.print(session.out);
  }
  std::string summary = fmt::format("{} {}: {} ({}), {}, {} of {}", flags.dry_run ? "would write" : "wrote",
                                    one_line(flags.destination), counted(report.tensors, "tensor"),
                                    format_bytes(report.tensor_bytes), counted(report.objects, "object"),
                                    counted(report.files.size(), "file"), format_bytes(report.file_bytes()));
  if (!flags.dry_run) {
    summary += fmt::format("; {:.2f} s", seconds);
    if (seconds >= 0.01) {
      summary += fmt::format(", {}/s", format_bytes(static_cast<std::uint64_t>(double(report.tensor_bytes) / seconds)));
    }
  }
  print_wrapped(session.out, summary);
}

void print_as_json(Session& session, const CommonFlags& flags, const ConvertReport& report, const Warnings& warnings,
                   double seconds) {
  nlohmann::ordered_json json = report_json(report);
  json["destination"] = flags.destination;
  json["dry_run"] = flags.dry_run;
  json["warnings"] = warnings.texts();
  json["seconds"] = seconds;
  session.out.print("{}\n", json_text(json, 2));
}

// Runs `work`, prints its warnings, also if it throws, and then its report.
template <typename Work>
ExitStatus run_and_report(const CommonFlags& flags, Session& session, const Warnings& warnings, const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  ConvertReport report;
  try {
    report = work();
  } catch (...) {
    session.progress.end();
    warnings.print(flags.all_warnings);
    throw;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  session.progress.end();
  warnings.print(flags.all_warnings);
  if (flags.json) {
    print_as_json(session, flags, report, warnings, seconds);
  } else {
    print_for_people(session, flags, report, seconds);
  }
  return kYes;
}

// Returns the config.json that states the parameters of maps: that of `hf_config` if it is given, or else the one
// beside the source; empty if there is none.
std::filesystem::path config_of(const CommonFlags& flags, const std::string& hf_config) {
  const std::filesystem::path folder = hf_config.empty() ? flags.source : hf_config;
  std::filesystem::path config = folder / checkpoint::kHfConfigFileName;
  std::error_code ignored;
  return std::filesystem::is_regular_file(config, ignored) ? config : std::filesystem::path();
}

void require_destination(const CommonFlags& flags) {
  if (flags.destination.empty() && !flags.map.check) throw UsageError("DST is required");
}

// Opens the source, calls work(source) with the view of it that the options specify, or carries out --check.
template <typename Work>
ExitStatus with_source(const CommonFlags& flags, Session& session, const std::string& hf_config, const Work& work) {
  const std::optional<checkpoint::TensorMap> map = map_of(flags.map, config_of(flags, hf_config));
  auto source = session.open(flags.source, flags.no_checksums, flags.all_warnings);
  if (flags.map.check) return print_check(session, *map, source, flags.json) ? kYes : kNo;
  if (map) source = map->apply(source);
  check_select_options(flags.selection, {source.get()});
  return work(source);
}

ExitStatus convert(const ConvertFlags& flags, Session& session) {
  checkpoint::ConvertOptions options;
  Warnings warnings;
  require_destination(flags);
  if (!flags.map.check) options.to = target_kind(flags);
  set_common_options(flags, session, warnings, options);
  options.hf_config = flags.hf_config;
  return with_source(flags, session, flags.hf_config, [&](const auto& source) {
    return run_and_report(flags, session, warnings,
                          [&] { return checkpoint::convert(source, flags.destination, options); });
  });
}

// Refuses a plan that would not fit the memory.
void check_pieces(const ReshardFlags& flags, const checkpoint::Checkpoint& source) {
  double pieces = 0;
  for (const checkpoint::TensorInfo& tensor : source.tensors()) {
    if (!flags.selection.takes(tensor.name) || tensor.shape.empty()) continue;
    const std::int64_t dim = checkpoint::dim_to_shard(static_cast<std::int64_t>(tensor.shape.size()), flags.dim);
    pieces += static_cast<double>(std::min(flags.ranks, tensor.shape[static_cast<std::size_t>(dim)]));
  }
  if (pieces <= kMaxPieces || flags.large) return;
  throw UsageError(fmt::format(
      "--ranks {} makes {:.1e} pieces of tensors, expected at most {:.0e}; --large writes them all the same",
      flags.ranks, pieces, kMaxPieces));
}

ExitStatus reshard(const ReshardFlags& flags, Session& session) {
  checkpoint::ReshardOptions options;
  Warnings warnings;
  require_destination(flags);
  if (flags.ranks == 0 && flags.like.empty() && !flags.map.check) {
    throw UsageError("either --ranks or --like is required");
  }
  set_common_options(flags, session, warnings, options);
  options.dim = flags.dim;
  return with_source(flags, session, "", [&](const auto& source) {
    if (flags.like.empty()) {
      options.ranks = flags.ranks;
      check_pieces(flags, *source);
    } else {
      options.like = session.open(flags.like, flags.no_checksums, flags.all_warnings);
    }
    return run_and_report(flags, session, warnings,
                          [&] { return checkpoint::reshard(source, flags.destination, options); });
  });
}

}  // namespace

Command convert_command() {
  const auto flags = std::make_shared<ConvertFlags>();
  Command command = {
      .name = "convert",
      .summary = "Write a checkpoint in another format.",
      .details =
          "Streams the tensors: memory use does not grow with the size of the checkpoint. DST appears complete "
          "or not at all. With --force, a directory DST is replaced with all files in it.",
      .examples = {"tessera convert step-1000 model.safetensors --select 'model.*' --dtype bfloat16",
                   "tessera convert step-1000 model/ --to safetensors --max-shard-size 5GB",
                   "tessera convert model.pt step-0 --to dcp",
                   "tessera convert step-1000 model/ --to safetensors --map llama-torchtitan-to-hf --hf-config base/"},
      .options = {{.name = "to",
                   .value_name = "FORMAT",
                   .help =
                       "dcp, safetensors, torch or torch_checkpointing; or DST ends in .safetensors, .pt, .pth, .bin",
                   .target = &flags->to,
                   .choices = "dcp safetensors torch torch_checkpointing"},
                  {.name = "hf-config",
                   .value_name = "DIR",
                   .help = "Copy the configuration and tokenizer files of a Hugging Face model beside the tensors",
                   .target = &flags->hf_config,
                   .is_path = true}},
      .run = [flags](Session& session) { return convert(*flags, session); }};
  add_common_options(*flags, command.options);
  return command;
}

Command reshard_command() {
  const auto flags = std::make_shared<ReshardFlags>();
  Command command = {
      .name = "reshard",
      .summary = "Write a checkpoint laid out for another number of ranks.",
      .details = "Writes a distributed checkpoint (DCP) of the same state.",
      .examples = {"tessera reshard step-1000 step-1000-for-16 --ranks 16",
                   "tessera reshard model.safetensors step-0 --like step-1000"},
      .options = {{.name = "ranks",
                   .value_name = "N",
                   .help = "Number of ranks to lay it out for",
                   .target = &flags->ranks,
                   .range = Range{1, 1 << 20}},
                  {.name = "dim",
                   .value_name = "D",
                   .help = "Dimension to shard, counted from the last if negative; tensors without it are "
                           "sharded in their last one",
                   .target = &flags->dim,
                   .default_text = "0"},
                  {.name = "like",
                   .value_name = "OTHER",
                   .help = "Take ranks and boxes from this checkpoint, instead of --ranks and --dim",
                   .target = &flags->like,
                   .is_path = true,
                   .conflicts = "ranks dim"}},
      .run = [flags](Session& session) { return reshard(*flags, session); }};
  add_common_options(*flags, command.options);
  return command;
}

}  // namespace tessera::cli
