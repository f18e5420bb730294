#include "tessera/checkpoint/diff.h"

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

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

struct Flags {
  std::string a, b;
  checkpoint::Selection selection;
  std::int64_t jobs = 0;
  bool json = false, no_checksums = false, expand = false;
};

void print_for_people(Session& session, const DiffReport& report) {
  for (const Difference& difference : report.differences) {
    session.out.print("{}\n", wrap(one_line(to_string(difference)), session.out.columns()));
  }
  const std::size_t count = report.differences.size();
  session.out.print("{}: {} ({}) and {} compared\n", report.same() ? "same" : counted(count, "difference"),
                    counted(report.tensors, "tensor"), format_bytes(report.bytes), counted(report.objects, "object"));
}

ExitStatus diff(const Flags& flags, Session& session) {
  const auto a = session.open(flags.a, flags.no_checksums);
  const auto b = session.open(flags.b, flags.no_checksums);
  check_select_options(flags.selection, {a.get(), b.get()});
  checkpoint::DiffOptions options;
  options.selection = flags.selection;
  options.expand = flags.expand;
  options.jobs = static_cast<std::size_t>(flags.jobs);
  options.progress = &session.progress;
  options.cancellation = &session.cancellation;
  const DiffReport report = checkpoint::diff(a, b, options);
  session.progress.end();
  if (flags.json) {
    session.out.print("{}\n", json_text(report_json(report), 2));
  } else {
    print_for_people(session, report);
  }
  return report.same() ? kYes : kNo;
}

}  // namespace

Command diff_command() {
  const auto flags = std::make_shared<Flags>();
  return {.name = "diff",
          .summary = "Compare two checkpoints, whatever their formats.",
          .details =
              "Compares names, dtypes, shapes, every element bit by bit, and objects by value. How the state is "
              "divided into chunks and files does not matter. Exit status 0: equal; 1: different.",
          .examples = {"tessera diff step-1000 step-1000.safetensors --select 'model.*'"},
          .options = {checkpoint_argument("A", flags->a), checkpoint_argument("B", flags->b),
                      select_option(flags->selection), exclude_option(flags->selection), jobs_option(flags->jobs),
                      no_checksums_option(flags->no_checksums), expand_option(flags->expand), json_option(flags->json)},
          .run = [flags](Session& session) { return diff(*flags, session); }};
}

}  // namespace tessera::cli
