// `tessera inspect` of a run's directory: a table of its steps.

#include <fmt/format.h>

#include <array>
#include <ctime>
#include <string>

#include "cli/commands/inspect.h"
#include "cli/text/text_table.h"
#include "tessera/base/bytes.h"

namespace tessera::cli {
namespace {

using checkpoint::RunDirectory;
using checkpoint::RunEntry;
using Align = TextTable::Align;

std::string local_time(std::int64_t seconds) {
  if (seconds == 0) return "";
  const auto time = static_cast<std::time_t>(seconds);
  std::tm parts = {};
  ::localtime_r(&time, &parts);
  std::array<char, 64> text{};
  return {text.data(), std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%S", &parts)};
}

std::string state_of(const RunDirectory& run, std::size_t i) {
  const RunEntry& entry = run.entries[i];
  if (run.newest_complete == i) return "complete, newest";
  switch (entry.kind) {
    case RunEntry::Kind::step:
      if (!entry.format) return "unknown";
      return entry.complete ? "complete" : "incomplete";
    case RunEntry::Kind::link:
      return "link";
    case RunEntry::Kind::staging:
      return entry.in_use ? "being written" : "unfinished";
    case RunEntry::Kind::removed:
      return "removed";
  }
  return "unknown";
}

}  // namespace

void print_run(Session& session, const RunDirectory& run) {
  TextTable table({{"STEP", Align::left, 14, true},
                   {"STATE"},
                   {"BYTES", Align::right, 9},
                   {"RANKS", Align::right, 5},
                   {"WRITTEN", Align::left, 19}});
  std::size_t complete = 0;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < run.entries.size(); ++i) {
    const RunEntry& entry = run.entries[i];
    complete += entry.complete ? 1 : 0;
    bytes += entry.size_bytes;
    table.add({one_line(entry.name), state_of(run, i), format_bytes(entry.size_bytes),
               entry.ranks ? fmt::to_string(*entry.ranks) : "", local_time(entry.modified_s)});
  }
  table.print(session.out);
  for (const RunEntry& entry : run.entries) {
    if (entry.problem.empty()) continue;
    print_wrapped(session.out, fmt::format("note: {}: {}", one_line(entry.name), one_line(entry.problem)));
  }
  session.out.write("\n");
  print_wrapped(session.out, fmt::format("{}: {} of {} complete, {}", one_line(run.path.string()), complete,
                                         counted(run.entries.size(), "step"), format_bytes(bytes)));
}

void print_steps_note(Session& session, const std::string& directory) {
  const std::size_t steps = checkpoint::find_steps(directory).size();
  if (steps == 0) return;
  print_wrapped(session.out, fmt::format("note: {} in this directory; --steps lists {}", counted(steps, "step"),
                                         steps == 1 ? "it" : "them"));
}

}  // namespace tessera::cli
