#pragma once
// What a command runs with.

#include <memory>
#include <string>

#include "cli/command.h"
#include "cli/output.h"
#include "tessera/base/cancellation.h"
#include "tessera/base/progress.h"
#include "tessera/checkpoint/checkpoint.h"

namespace tessera::cli {

struct Session {
  explicit Session(const Cancellation& cancellation_in) : cancellation(cancellation_in), out(cancellation_in) {}

  // Opens a checkpoint and prints its warnings; of many alike only some unless `all_warnings`.
  static std::shared_ptr<const checkpoint::Checkpoint> open(const std::string& path, bool no_checksums = false,
                                                            bool all_warnings = false);
  // Returns where an operation reports its progress.
  ProgressSink* progress_unless(bool quiet) { return quiet ? &no_progress() : &progress; }

  const Cancellation& cancellation;
  Output out;
  TerminalProgress progress;
};

}  // namespace tessera::cli
