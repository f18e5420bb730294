#include "tessera/checkpoint/manage/prune.h"

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "cli/session.h"
#include "cli/text/json_text.h"
#include "cli/text/text_table.h"
#include "tessera/base/bytes.h"
#include "tessera/checkpoint/report_json.h"

namespace tessera::cli {
namespace {

using checkpoint::KeptEntry;
using checkpoint::PrunedEntry;
using checkpoint::PruneReport;

struct PruneFlags {
  std::string path;
  std::int64_t keep = 0, every = 0;
  bool incomplete = false, dry_run = false, json = false;
};

void print_summary(Session& session, const PruneFlags& flags, const PruneReport& report) {
  const auto print = [&](const std::string& text) { print_wrapped(session.out, text); };
  for (const KeptEntry& entry : report.kept)
    print(fmt::format("kept {}: {}", one_line(entry.name), one_line(entry.why)));
  const std::size_t removed = report.removed.size();
  print(fmt::format("{} {} of {}, {}", flags.dry_run ? "would remove" : "removed", removed,
                    counted(removed + report.kept.size() + report.failed.size(), "step"),
                    format_bytes(report.freed_bytes)));
}

ExitStatus prune(const PruneFlags& flags, Session& session) {
  checkpoint::PruneOptions options;
  options.keep = static_cast<std::size_t>(flags.keep);
  if (flags.every != 0) options.every = flags.every;
  options.incomplete = flags.incomplete;
  options.dry_run = flags.dry_run;
  options.cancellation = &session.cancellation;
  if (!flags.json) {
    options.removed = [&](const PrunedEntry& entry) {
      print_wrapped(session.out, fmt::format("{} {}: {}, {}", flags.dry_run ? "would remove" : "removed",
                                             one_line(entry.name), entry.why, format_bytes(entry.size_bytes)));
      session.out.flush();
    };
  }
  const PruneReport report = checkpoint::prune(flags.path, options);
  if (flags.json) {
    nlohmann::ordered_json json = checkpoint::report_json(report);
    json["run"] = flags.path;
    json["dry_run"] = flags.dry_run;
    session.out.print("{}\n", json_text(json, 2));
  } else {
    print_summary(session, flags, report);
  }
  for (const std::string& failure : report.failed) print_error(failure);
  return report.failed.empty() ? kYes : kFailed;
}

}  // namespace

Command prune_command() {
  const auto flags = std::make_shared<PruneFlags>();
  return {
      .name = "prune",
      .summary = "Remove old steps from the directory of a run.",
      .details =
          "Keeps the newest N complete steps and the multiples of K. Also keeps steps that a symbolic link or a "
          "file 'latest' in the directory refers to, what is being written, and everything that is not a step of a "
          "known format. Incomplete steps are kept unless --incomplete is given; those newer than the newest "
          "complete step always. Each step is complete or gone, even if the command is killed; the next one deletes "
          "what was left.",
      .examples = {"tessera prune checkpoints --keep 3 --every 1000 --dry-run"},
      .options = {{.name = "RUN",
                   .help = "Directory of a run, with one checkpoint for each step",
                   .target = &flags->path,
                   .positional = true,
                   .required = true,
                   .is_path = true},
                  {.name = "keep",
                   .value_name = "N",
                   .help = "Number of the newest complete steps to keep",
                   .target = &flags->keep,
                   .required = true,
                   .range = Range{1, INT32_MAX}},
                  {.name = "every",
                   .value_name = "K",
                   .help = "Keep the steps whose number is a multiple of K, too",
                   .target = &flags->every,
                   .range = Range{1, INT64_MAX}},
                  {.name = "incomplete",
                   .help = "Also remove incomplete steps that are older than the newest complete one, and what ended "
                           "conversions left for such steps",
                   .target = &flags->incomplete},
                  {.name = "dry-run",
                   .help = "Print what would be removed, and remove nothing",
                   .target = &flags->dry_run},
                  json_option(flags->json)},
      .run = [flags](Session& session) { return prune(*flags, session); }};
}

}  // namespace tessera::cli
