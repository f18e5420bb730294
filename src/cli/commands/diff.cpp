#include "tessera/checkpoint/diff.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "cli/selection.h"
#include "cli/session.h"
#include "cli/text/json_text.h"
#include "cli/text/text_table.h"
#include "tessera/base/bytes.h"
#include "tessera/checkpoint/report_json.h"

namespace tessera::cli {
namespace {

using checkpoint::Difference;
using checkpoint::DiffReport;

struct DiffFlags {
  std::string a, b;
  checkpoint::Selection selection;
  std::string atol, rtol;
  std::int64_t jobs = 0;
  bool json = false, no_checksums = false, expand = false, equal_nan = false, all = false, quiet = false;
  bool all_warnings = false;
};

constexpr std::size_t kShownDifferences = 40;  // without --all

double parse_tolerance(std::string_view option, const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && std::isfinite(value) && value >= 0) return value;
  throw UsageError(fmt::format("{}: '{}', expected a finite number of at least 0, such as 1e-5", option, text));
}

std::optional<checkpoint::Tolerance> tolerance_of(const DiffFlags& flags) {
  if (flags.atol.empty() && flags.rtol.empty() && !flags.equal_nan) return std::nullopt;
  checkpoint::Tolerance tolerance;
  if (!flags.atol.empty()) tolerance.atol = parse_tolerance("--atol", flags.atol);
  if (!flags.rtol.empty()) tolerance.rtol = parse_tolerance("--rtol", flags.rtol);
  tolerance.equal_nan = flags.equal_nan;
  return tolerance;
}

void print_for_people(Session& session, const DiffReport& report, bool all) {
  const std::size_t count = report.differences.size();
  const std::size_t shown = all || count <= kShownDifferences + 1 ? count : kShownDifferences;
  for (std::size_t i = 0; i < shown; ++i) {
    print_wrapped(session.out, one_line(to_string(report.differences[i])));
  }
  if (shown < count) session.out.print("... and {}; --all prints them\n", counted(count - shown, "more difference"));
  session.out.print("{}: {} ({}) and {} compared\n", report.same() ? "same" : counted(count, "difference"),
                    counted(report.tensors, "tensor"), format_bytes(report.bytes), counted(report.objects, "object"));
}

ExitStatus diff(const DiffFlags& flags, Session& session) {
  checkpoint::DiffOptions options;
  options.tolerance = tolerance_of(flags);
  const auto a = session.open(flags.a, flags.no_checksums, flags.all_warnings);
  const auto b = session.open(flags.b, flags.no_checksums, flags.all_warnings);
  check_select_options(flags.selection, {a.get(), b.get()});
  options.selection = flags.selection;
  options.expand = flags.expand;
  options.jobs = static_cast<std::size_t>(flags.jobs);
  options.progress = session.progress_unless(flags.quiet);
  options.cancellation = &session.cancellation;
  const DiffReport report = checkpoint::diff(a, b, options);
  session.progress.end();
  if (flags.json) {
    session.out.print("{}\n", json_text(report_json(report), 2));
  } else {
    print_for_people(session, report, flags.all);
  }
  return report.same() ? kYes : kNo;
}

}  // namespace

Command diff_command() {
  const auto flags = std::make_shared<DiffFlags>();
  return {
      .name = "diff",
      .summary = "Compare two checkpoints, whatever their formats.",
      .details =
          "Compares names, dtypes, shapes, every element bit by bit, and objects by value. How the state is "
          "divided into chunks and files does not matter. With --atol, --rtol or --equal-nan, elements are compared "
          "by value, also across dtypes, which are widened to float64: they are equal if |a - b| <= ATOL + RTOL * "
          "|b|, as in torch.allclose. A tolerance that is not given is 0. Exit status 0: equal; 1: different.",
      .examples = {"tessera diff step-1000 step-1000.safetensors --select 'model.*'",
                   "tessera diff step-1000 bfloat16.safetensors --rtol 0.004"},
      .options =
          {checkpoint_argument("A", flags->a),
           checkpoint_argument("B", flags->b),
           {.name = "atol", .value_name = "X", .help = "Compare by value: absolute tolerance", .target = &flags->atol},
           {.name = "rtol",
            .value_name = "X",
            .help = "Compare by value: tolerance relative to the second checkpoint's element",
            .target = &flags->rtol},
           {.name = "equal-nan", .help = "Compare by value: NaN equals NaN", .target = &flags->equal_nan},
           {.name = "all", .help = "Print more than 40 differences, as --json always does", .target = &flags->all},
           select_option(flags->selection),
           exclude_option(flags->selection),
           jobs_option(flags->jobs),
           no_checksums_option(flags->no_checksums),
           expand_option(flags->expand),
           quiet_option(flags->quiet),
           all_warnings_option(flags->all_warnings),
           json_option(flags->json)},
      .run = [flags](Session& session) { return diff(*flags, session); }};
}

}  // namespace tessera::cli
