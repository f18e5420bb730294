#include "tessera/checkpoint/verify.h"

#include <fmt/ranges.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/json_text.h"
#include "cli/text_table.h"
#include "tessera/base/bytes.h"

namespace tessera::cli {
namespace {

using checkpoint::Problem;
using checkpoint::VerifyReport;

struct Flags {
  std::string path;
  std::size_t jobs = 0;
  bool json = false;
};

void print_for_people(Session& session, const VerifyReport& report) {
  const auto print = [&](const std::string& text) { session.out.print("{}\n", wrap(text, session.out.columns())); };
  for (const Problem& problem : report.problems) print(one_line(problem.what));
  if (report.problem_count > report.problems.size()) {
    print(fmt::format("... and {} more", report.problem_count - report.problems.size()));
  }
  if (!report.left_over.empty()) {
    print(fmt::format("note: {} that nothing refers to, left by an interrupted save: {}",
                      counted(report.left_over.size(), "file"),
                      one_line(fmt::format("{}", fmt::join(report.left_over, ", ")))));
  }
  std::string said =
      fmt::format("{}: {} in {}, {}, {}; {} compared with checksums",
                  report.good() ? "good" : counted(report.problem_count, "problem"), counted(report.tensors, "tensor"),
                  counted(report.chunks, "chunk"), counted(report.objects, "object"), counted(report.files, "file"),
                  format_bytes(report.bytes_checked));
  if (report.bytes_without_checksum > 0) {
    said += fmt::format(", {} have none", format_bytes(report.bytes_without_checksum));
  }
  print(said + (report.has_sidecar ? ", sidecar agrees" : ", no sidecar"));
}

void print_as_json(Session& session, const VerifyReport& report) {
  using Json = nlohmann::ordered_json;
  Json problems = Json::array();
  for (const Problem& problem : report.problems) {
    problems.push_back({{"file", problem.file.empty() ? Json() : Json(problem.file)},
                        {"offset_bytes", problem.offset_bytes ? Json(*problem.offset_bytes) : Json()},
                        {"name", problem.name.empty() ? Json() : Json(problem.name)},
                        {"what", problem.what}});
  }
  const Json json = {{"good", report.good()},
                     {"problems", problems},
                     {"problem_count", report.problem_count},
                     {"tensors", report.tensors},
                     {"chunks", report.chunks},
                     {"objects", report.objects},
                     {"files", report.files},
                     {"bytes_checked", report.bytes_checked},
                     {"bytes_without_checksum", report.bytes_without_checksum},
                     {"has_sidecar", report.has_sidecar},
                     {"left_over", report.left_over}};
  session.out.print("{}\n", json_text(json, 2));
}

ExitStatus verify(const Flags& flags, Session& session) {
  checkpoint::VerifyOptions options;
  options.jobs = flags.jobs;
  options.progress = &session.progress;
  options.cancellation = &session.cancellation;
  const VerifyReport report = checkpoint::verify(flags.path, options);
  session.progress.end();
  if (flags.json) {
    print_as_json(session, report);
  } else {
    print_for_people(session, report);
  }
  return report.good() ? kYes : kNo;
}

}  // namespace

Command add_verify(CLI::App& parent) {
  auto flags = std::make_shared<Flags>();
  CLI::App* app = parent.add_subcommand("verify", "Check that every byte is accounted for and every checksum right");
  app->add_option("CKPT", flags->path, "The checkpoint")->required();
  add_json_flag(*app, flags->json);
  add_jobs_flag(*app, flags->jobs);
  app->footer(
      "Prints each problem with file, byte offset and name. Exit status 0: good, 1: damaged.\n\n"
      "Example:\n"
      "  tessera verify step-1000 && rm -r step-0900");
  return {app, [flags](Session& session) { return verify(*flags, session); }};
}

}  // namespace tessera::cli
