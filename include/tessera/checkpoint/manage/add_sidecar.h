#pragma once
/// \file
/// Checksums for a checkpoint that another program wrote: adds a sidecar (see sidecar.h) to it.

#include <cstdint>
#include <filesystem>

#include "tessera/base/cancellation.h"
#include "tessera/base/progress.h"
#include "tessera/checkpoint/verify.h"

namespace tessera::checkpoint {

struct AddSidecarOptions {
  std::size_t jobs = 0;  ///< threads; 0: one per processor, at least 4, at most 16
  /// Whether to write the sidecar even if the checkpoint has problems, or differs from the sidecar that it has.
  bool force = false;
  ProgressSink* progress = nullptr;
  const Cancellation* cancellation = nullptr;
};

struct AddSidecarReport {
  std::filesystem::path sidecar;
  std::uint64_t files = 0, bytes = 0;  ///< that the sidecar lists
  bool written = false;                ///< false if the sidecar was there and agrees, or if there are problems
  bool replaced = false;               ///< whether another sidecar was there before
  VerifyReport verified;               ///< what verify() found before
};

/// Verifies a checkpoint and writes the size and the checksums of all its files into its sidecar, as a save does. If
/// the checkpoint has a sidecar and agrees with it, writes nothing. If there are problems, writes nothing unless
/// `options.force` is true. An index gets the sidecar of its directory, which keeps what it has about files that are
/// not of this index. Even if the process is killed, the sidecar appears complete or not at all. Apart from 4 bytes for
/// each 128 KiB, memory does not grow with the data. Throws `Error(io)` if a file changes meanwhile, and
/// `Error(invalid_argument)` if the name of a file in the directory is not UTF-8, or if there is the
/// `.tessera.json.tmp` of a save that is being committed, or was killed then; also throws as verify and
/// Checkpoint::open. A save to the directory never fails because of this function.
AddSidecarReport add_sidecar(const std::filesystem::path& checkpoint, const AddSidecarOptions& options = {});

}  // namespace tessera::checkpoint
