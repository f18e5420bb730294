#pragma once
/// \file
/// Progress of a long operation in bytes. The library counts; who wants to show it implements `ProgressSink`.

#include <cstdint>
#include <string_view>

namespace tessera {

/// Called by worker threads at the same time; implementations must be thread-safe and quick.
class ProgressSink {
 public:
  virtual ~ProgressSink() = default;
  /// A phase begins, for example "verify", of `total_bytes` (0: not known).
  virtual void begin(std::string_view phase, std::uint64_t total_bytes) = 0;
  virtual void advance(std::uint64_t bytes) = 0;
  virtual void end() = 0;
};

/// Shows nothing.
ProgressSink& no_progress();

/// A line that is redrawn in place on standard error, at most ten times a second; shows nothing where standard error is
/// not a terminal. One per process at a time.
class TerminalProgress final : public ProgressSink {
 public:
  TerminalProgress();
  ~TerminalProgress() override;
  void begin(std::string_view phase, std::uint64_t total_bytes) override;
  void advance(std::uint64_t bytes) override;
  void end() override;

 private:
  struct State;
  State* state_;  // null where standard error is no terminal
};

}  // namespace tessera
