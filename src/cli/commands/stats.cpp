#include "tessera/checkpoint/inspect/stats.h"

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/selection.h"
#include "cli/session.h"
#include "cli/text/json_text.h"
#include "cli/text/names.h"
#include "cli/text/text_table.h"
#include "tessera/base/bytes.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/report_json.h"

namespace tessera::cli {
namespace {

using checkpoint::StatsReport;
using checkpoint::TensorStats;
using Align = TextTable::Align;

struct StatsFlags {
  std::string path, sort, fail_on;
  std::vector<std::string> names;
  checkpoint::Selection selection;
  std::int64_t jobs = 0;
  bool json = false, no_checksums = false, expand = false, quiet = false, all_warnings = false;
};

std::string number_text(const std::optional<checkpoint::Number>& number) {
  if (!number) return "";
  if (const auto* real = std::get_if<double>(&*number)) return fmt::format("{:.6g}", *real);
  if (const auto* value = std::get_if<std::complex<double>>(&*number)) {
    return fmt::format("({:.6g}{:+.6g}j)", value->real(), value->imag());
  }
  return checkpoint::to_string(*number);
}

std::string number_text(const std::optional<double>& number) {
  return number ? fmt::format("{:.6g}", *number) : std::string();
}

void print_for_people(Session& session, const StatsReport& report) {
  TextTable table({{"TENSOR", Align::left, 20, true},
                   {"NAN", Align::right},
                   {"INF", Align::right},
                   {"MIN", Align::right, 6},
                   {"MAX", Align::right, 6},
                   {"MEAN", Align::right, 6},
                   {"STD", Align::right, 6},
                   {"NORM", Align::right, 6},
                   {"ZEROS", Align::right, 5},
                   {"DTYPE", Align::left, 7},
                   {"SHAPE", Align::left, 8}});
  for (const TensorStats& tensor : report.tensors) {
    const auto count = [&](std::uint64_t value) { return tensor.is_numeric ? fmt::to_string(value) : std::string(); };
    table.add({one_line(tensor.name), count(tensor.nans), count(tensor.infs), number_text(tensor.min),
               number_text(tensor.max), number_text(tensor.mean), number_text(tensor.stddev), number_text(tensor.norm),
               count(tensor.zeros), std::string(dtype_name(tensor.dtype)), shape_to_string(tensor.shape)});
  }
  table.print(session.out);
  const std::string total =
      fmt::format("total: {} ({}), {}: {} NaN, {} Inf, {}, norm {:.6g}", counted(report.tensors.size(), "tensor"),
                  format_bytes(report.bytes), counted(report.elements, "element"), report.nans, report.infs,
                  report.zeros == 1 ? "1 zero" : fmt::format("{} zeros", report.zeros), report.norm);
  print_wrapped(session.out, total);
}

// Returns the tensors that names and globs select.
std::vector<std::size_t> chosen_tensors(const checkpoint::Checkpoint& checkpoint, const StatsFlags& flags) {
  const NamedItems items = find_names(checkpoint, flags.names);
  if (items.tensors.empty() && !flags.names.empty()) {
    fail(ErrorCode::invalid_argument, "{}: the names are those of objects, expected tensors",
         checkpoint.path().string());
  }
  std::vector<std::size_t> chosen;
  for (const std::size_t i : items.tensors) {
    if (flags.selection.takes(checkpoint.tensors()[i].name)) chosen.push_back(i);
  }
  if (chosen.empty() && !items.tensors.empty()) {
    throw UsageError("the names, --select and --exclude leave no tensor, expected at least one");
  }
  return chosen;
}

ExitStatus stats(const StatsFlags& flags, Session& session) {
  const auto opened = session.open(flags.path, flags.no_checksums, flags.all_warnings);
  check_select_options(flags.selection, {opened.get()});
  checkpoint::StatsOptions options;
  options.tensors = chosen_tensors(*opened, flags);
  options.expand = flags.expand;
  options.jobs = static_cast<std::size_t>(flags.jobs);
  options.progress = session.progress_unless(flags.quiet);
  options.cancellation = &session.cancellation;
  StatsReport report = checkpoint::stats(opened, options);
  session.progress.end();
  if (const auto key = checkpoint::find_stats_key(flags.sort)) checkpoint::sort_stats(report.tensors, *key);
  if (flags.json) {
    session.out.print("{}\n", json_text(report_json(report), 2));
  } else {
    print_for_people(session, report);
  }
  const bool fails = (flags.fail_on.find("nan") != std::string::npos && report.nans > 0) ||
                     (flags.fail_on.find("inf") != std::string::npos && report.infs > 0);
  return fails ? kNo : kYes;
}

}  // namespace

Command stats_command() {
  const auto flags = std::make_shared<StatsFlags>();
  return {.name = "stats",
          .summary = "Print minimum, maximum, mean, standard deviation, norm, zeros, NaN and infinities of tensors.",
          .details =
              "Reads every byte once, in constant memory. NaN are counted and left out of the other statistics; "
              "infinities make them infinite or NaN. STD is that of a sample (n - 1), as torch.std; NORM is the L2 "
              "norm. A complex tensor has no minimum and maximum, and the norm of its magnitudes. Tensors that are "
              "quantized in blocks are taken as they are stored, without their scales.",
          .examples = {"tessera stats step-1000 --sort norm", "tessera stats step-1000 'model.*' --fail-on nan,inf",
                       "tessera stats step-1000 --json | jq '.tensors[] | select(.nan > 0).name'"},
          .options = {checkpoint_argument("CKPT", flags->path),
                      {.name = "FQN", .help = "Names or globs of tensors", .target = &flags->names, .positional = true},
                      select_option(flags->selection),
                      exclude_option(flags->selection),
                      {.name = "sort",
                       .value_name = "KEY",
                       .help = "name, size, min, max, mean, std, norm, zeros, nan or inf: name and min ascending, the "
                               "others descending; what a tensor does not have is last",
                       .target = &flags->sort,
                       .default_text = "the checkpoint's order",
                       .choices = "name size min max mean std norm zeros nan inf"},
                      {.name = "fail-on",
                       .value_name = "WHAT",
                       .help = "Exit with status 1 if there is any of nan, inf, or nan,inf",
                       .target = &flags->fail_on,
                       .choices = "nan inf nan,inf inf,nan"},
                      jobs_option(flags->jobs),
                      no_checksums_option(flags->no_checksums),
                      expand_option(flags->expand),
                      quiet_option(flags->quiet),
                      all_warnings_option(flags->all_warnings),
                      json_option(flags->json)},
          .run = [flags](Session& session) { return stats(*flags, session); }};
}

}  // namespace tessera::cli
