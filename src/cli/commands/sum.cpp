#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands/verify.h"
#include "cli/text/json_text.h"
#include "cli/text/text_table.h"
#include "tessera/base/bytes.h"
#include "tessera/checkpoint/manage/add_sidecar.h"
#include "tessera/checkpoint/report_json.h"

namespace tessera::cli {
namespace {

using checkpoint::AddSidecarReport;

struct SumFlags {
  std::string path;
  std::int64_t jobs = 0;
  bool force = false, json = false, quiet = false;
};

void print_for_people(Session& session, const AddSidecarReport& report) {
  print_problems(session, report.verified);
  const std::string sidecar = one_line(report.sidecar.string());
  std::string text;
  if (report.written) {
    text = fmt::format("{} {}: checksums of {}, {}", report.replaced ? "replaced" : "wrote", sidecar,
                       counted(report.files, "file"), format_bytes(report.bytes));
  } else if (report.verified.good()) {
    text = fmt::format("{} agrees: checksums of {}, {}", sidecar, counted(report.files, "file"),
                       format_bytes(report.bytes));
  } else {
    text = fmt::format("{} was not written: {}; --force writes the checksums of the files as they are", sidecar,
                       counted(report.verified.problem_count, "problem"));
  }
  print_wrapped(session.out, text);
}

ExitStatus sum(const SumFlags& flags, Session& session) {
  checkpoint::AddSidecarOptions options;
  options.jobs = static_cast<std::size_t>(flags.jobs);
  options.force = flags.force;
  options.progress = session.progress_unless(flags.quiet);
  options.cancellation = &session.cancellation;
  const AddSidecarReport report = checkpoint::add_sidecar(flags.path, options);
  session.progress.end();
  if (flags.json) {
    session.out.print("{}\n", json_text(checkpoint::report_json(report), 2));
  } else {
    print_for_people(session, report);
  }
  return report.written || report.verified.good() ? kYes : kNo;
}

}  // namespace

Command sum_command() {
  const auto flags = std::make_shared<SumFlags>();
  return {
      .name = "sum",
      .summary = "Write checksums for a checkpoint that another program wrote.",
      .details =
          "Writes the size and the CRC-32 of every file, and of each of its blocks, to .tessera.json in the "
          "checkpoint's directory, or next to a single file. From then on, every command compares what it reads with "
          "them. Verifies the checkpoint first. If it is damaged, or differs from the checksums that it has, prints "
          "the problems and writes nothing: exit status 1.",
      .examples = {"tessera sum model.safetensors", "tessera sum step-1000 && tessera verify step-1000"},
      .options = {checkpoint_argument("CKPT", flags->path),
                  {.name = "force",
                   .help = "Write checksums of the files as they are, whatever the problems",
                   .target = &flags->force},
                  jobs_option(flags->jobs),
                  quiet_option(flags->quiet),
                  json_option(flags->json)},
      .run = [flags](Session& session) { return sum(*flags, session); }};
}

}  // namespace tessera::cli
