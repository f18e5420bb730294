#include "tessera/checkpoint/diff.h"

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/json_text.h"
#include "cli/text_table.h"
#include "tessera/base/bytes.h"

namespace tessera::cli {
namespace {

using checkpoint::Difference;
using checkpoint::DiffReport;

struct Flags {
  std::string a, b;
  checkpoint::Selection selection;
  std::size_t jobs = 0;
  bool json = false;
};

std::string_view kind_name(Difference::Kind kind) {
  switch (kind) {
    case Difference::Kind::only_in_a:
      return "only_in_a";
    case Difference::Kind::only_in_b:
      return "only_in_b";
    case Difference::Kind::dtype:
      return "dtype";
    case Difference::Kind::shape:
      return "shape";
    case Difference::Kind::elements:
      return "elements";
    case Difference::Kind::object:
      return "object";
    case Difference::Kind::kind:
      return "kind";
  }
  return "unknown";
}

void print_for_people(Session& session, const DiffReport& report) {
  for (const Difference& difference : report.differences) {
    session.out.print("{}\n", wrap(one_line(to_string(difference)), session.out.columns()));
  }
  const std::size_t count = report.differences.size();
  session.out.print("{}: {} ({}) and {} compared\n", report.same() ? "same" : counted(count, "difference"),
                    counted(report.tensors, "tensor"), format_bytes(report.bytes), counted(report.objects, "object"));
}

void print_as_json(Session& session, const DiffReport& report) {
  using Json = nlohmann::ordered_json;
  Json differences = Json::array();
  for (const Difference& difference : report.differences) {
    Json one = {
        {"kind", kind_name(difference.kind)}, {"name", difference.name}, {"a", difference.a}, {"b", difference.b}};
    if (difference.kind == Difference::Kind::elements) {
      one["index"] = difference.index;
      one["differing_elements"] = difference.differing_elements;
    }
    differences.push_back(std::move(one));
  }
  const Json json = {{"same", report.same()},
                     {"differences", differences},
                     {"tensors", report.tensors},
                     {"objects", report.objects},
                     {"bytes", report.bytes}};
  session.out.print("{}\n", json_text(json, 2));
}

ExitStatus diff(const Flags& flags, Session& session) {
  const auto a = session.open(flags.a);
  const auto b = session.open(flags.b);
  check_selection(flags.selection, {a.get(), b.get()});
  checkpoint::DiffOptions options;
  options.selection = flags.selection;
  options.jobs = flags.jobs;
  options.progress = &session.progress;
  options.cancellation = &session.cancellation;
  const DiffReport report = checkpoint::diff(a, b, options);
  session.progress.end();
  if (flags.json) {
    print_as_json(session, report);
  } else {
    print_for_people(session, report);
  }
  return report.same() ? kYes : kNo;
}

}  // namespace

Command add_diff(CLI::App& parent) {
  auto flags = std::make_shared<Flags>();
  CLI::App* app = parent.add_subcommand("diff", "Whether two checkpoints hold the same state, of whatever formats");
  app->add_option("A", flags->a, "A checkpoint")->required();
  app->add_option("B", flags->b, "Another one")->required();
  add_selection_flags(*app, flags->selection);
  add_jobs_flag(*app, flags->jobs);
  add_json_flag(*app, flags->json);
  app->footer(
      "Compares names, dtypes, shapes, every element by its bits, and objects by value; how the state is\n"
      "cut into chunks and files doesn't count. Exit status 0: same, 1: not.\n\n"
      "Example:\n"
      "  tessera diff step-1000 step-1000.safetensors --select 'model.*'");
  return {app, [flags](Session& session) { return diff(*flags, session); }};
}

}  // namespace tessera::cli
