#pragma once
/// \file
/// Progress of a long operation, in bytes. The library reports it; a caller that displays it implements `ProgressSink`.

#include <cstdint>
#include <string_view>

namespace tessera {

/// A receiver of progress. Worker threads call it at the same time; implementations must be thread-safe and fast.
class ProgressSink {
 public:
  virtual ~ProgressSink() = default;
  /// Begins a phase, for example "verify", of `total_bytes` (0: unknown).
  virtual void begin(std::string_view phase, std::uint64_t total_bytes) = 0;
  /// Counts `bytes` as done in the current phase.
  virtual void advance(std::uint64_t bytes) = 0;
  /// Ends the phase.
  virtual void end() = 0;
};

/// Returns a sink that ignores all calls.
ProgressSink& no_progress();

/// A line on standard error that is redrawn in place at most ten times a second. After 2 seconds it also shows the time
/// left, by the rate of the last few seconds. Leaves out what the terminal has no room for. Shows nothing if standard
/// error is not a terminal. A process may have one at a time.
class TerminalProgress final : public ProgressSink {
 public:
  TerminalProgress();
  ~TerminalProgress() override;
  void begin(std::string_view phase, std::uint64_t total_bytes) override;
  void advance(std::uint64_t bytes) override;
  void end() override;

 private:
  struct State;
  State* state_;  // null if standard error is not a terminal
};

}  // namespace tessera
