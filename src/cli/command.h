#pragma once
// What the commands share: how one is registered, what it runs with, and flags that mean the same everywhere.

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/output.h"
#include "tessera/base/cancellation.h"
#include "tessera/base/progress.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"

namespace tessera::cli {

enum ExitStatus : int { kYes = 0, kNo = 1, kUsage = 2, kFailed = 3 };

// Flags that contradict each other or the rest of the command line.
class UsageError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a command runs with.
struct Session {
  explicit Session(const Cancellation& cancellation_in) : cancellation(cancellation_in), out(cancellation_in) {}
  const Cancellation& cancellation;
  Output out;
  TerminalProgress progress;

  // Opens a checkpoint and passes on what it warns of.
  std::shared_ptr<const checkpoint::Checkpoint> open(const std::string& path);
};

struct Command {
  CLI::App* app = nullptr;
  std::function<int(Session&)> run;  // returns the exit status, an ExitStatus but for a program that was run
};

// Each declares its command in `parent`; what the flags are bound to lives in `run`.
Command add_inspect(CLI::App& parent);
Command add_verify(CLI::App& parent);
Command add_convert(CLI::App& parent);
Command add_reshard(CLI::App& parent);
Command add_diff(CLI::App& parent);
Command add_map(CLI::App& parent);
Command add_plan(CLI::App& parent);
Command add_run(CLI::App& parent);

void add_json_flag(CLI::App& app, bool& json);
void add_jobs_flag(CLI::App& app, std::size_t& jobs);
void add_selection_flags(CLI::App& app, checkpoint::Selection& selection);

// Throws UsageError if a --select glob matches no name in any of the checkpoints, or if the flags leave nothing of
// them: a misspelt name must not pass for an empty state.
void check_selection(const checkpoint::Selection& selection,
                     const std::vector<const checkpoint::Checkpoint*>& checkpoints);

// Bytes from "5GB", "1.5 GiB", "500MB", "1048576": decimal units of 1000, binary ones of 1024, no unit for bytes.
// Throws UsageError for anything else, for nothing and for more than 64 bits.
std::uint64_t parse_size(const std::string& text);

}  // namespace tessera::cli
