#include "cli/commands/verify.h"

#include <fmt/ranges.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "cli/session.h"
#include "cli/text/json_text.h"
#include "cli/text/text_table.h"
#include "tessera/base/bytes.h"
#include "tessera/checkpoint/report_json.h"

namespace tessera::cli {
namespace {

using checkpoint::Problem;
using checkpoint::VerifyReport;

struct VerifyFlags {
  std::string path;
  std::int64_t jobs = 0;
  bool json = false, quiet = false, all_warnings = false;
};

void print_for_people(Session& session, const VerifyReport& report) {
  const auto print = [&](const std::string& text) { print_wrapped(session.out, text); };
  print_problems(session, report);
  if (!report.left_over.empty()) {
    print(fmt::format("note: {} without a reference, left by an interrupted save: {}",
                      counted(report.left_over.size(), "file"),
                      one_line(fmt::format("{}", fmt::join(report.left_over, ", ")))));
  }
  if (!report.other_files.empty()) {
    print(fmt::format("note: {} that {} not part of the checkpoint: {}", counted(report.other_files.size(), "file"),
                      report.other_files.size() == 1 ? "is" : "are",
                      one_line(fmt::format("{}", fmt::join(report.other_files, ", ")))));
  }
  std::string summary =
      fmt::format("{}: {} in {}, {}, {}; {} compared with checksums",
                  report.good() ? "good" : counted(report.problem_count, "problem"), counted(report.tensors, "tensor"),
                  counted(report.chunks, "chunk"), counted(report.objects, "object"), counted(report.files, "file"),
                  format_bytes(report.bytes_checked));
  if (report.bytes_without_checksum > 0) {
    summary += fmt::format(", {} have none", format_bytes(report.bytes_without_checksum));
  }
  print(summary + (!report.has_sidecar     ? ", no sidecar"
                   : report.sidecar_agrees ? ", sidecar agrees"
                                           : ", sidecar disagrees"));
}

ExitStatus verify(const VerifyFlags& flags, Session& session) {
  checkpoint::VerifyOptions options;
  options.jobs = static_cast<std::size_t>(flags.jobs);
  options.progress = session.progress_unless(flags.quiet);
  options.cancellation = &session.cancellation;
  const VerifyReport report = checkpoint::verify(flags.path, options);
  session.progress.end();
  print_warnings(report.warnings, flags.all_warnings);
  if (flags.json) {
    session.out.print("{}\n", json_text(report_json(report), 2));
  } else {
    print_for_people(session, report);
  }
  return report.good() ? kYes : kNo;
}

}  // namespace

void print_problems(Session& session, const VerifyReport& report) {
  const auto print = [&](const std::string& text) { print_wrapped(session.out, text); };
  for (const Problem& problem : report.problems) print(one_line(problem.what));
  if (report.problem_count > report.problems.size()) {
    print(fmt::format("... and {} more", report.problem_count - report.problems.size()));
  }
}

Command verify_command() {
  const auto flags = std::make_shared<VerifyFlags>();
  return {.name = "verify",
          .summary = "Check that every byte is accounted for and every checksum matches.",
          .details = "Prints each problem with its file, byte offset and name. Exit status 0: no problem; 1: damaged.",
          .examples = {"tessera verify step-1000 && rm -r step-0900"},
          .options = {checkpoint_argument("CKPT", flags->path), json_option(flags->json),
                      all_warnings_option(flags->all_warnings), jobs_option(flags->jobs), quiet_option(flags->quiet)},
          .run = [flags](Session& session) { return verify(*flags, session); }};
}

}  // namespace tessera::cli
