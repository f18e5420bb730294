#include "tessera/base/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>

#include "tessera/base/bytes.h"

namespace tessera {
namespace {

class NoProgress final : public ProgressSink {
 public:
  void begin(std::string_view, std::uint64_t) override {}
  void advance(std::uint64_t) override {}
  void end() override {}
};

using Clock = std::chrono::steady_clock;
constexpr auto kRedrawInterval = std::chrono::milliseconds(100);

}  // namespace

ProgressSink& no_progress() {
  static NoProgress instance;
  return instance;
}

struct TerminalProgress::State {
  std::mutex mutex;
  std::string phase;
  std::uint64_t total_bytes = 0;
  std::atomic<std::uint64_t> done_bytes = 0;
  Clock::time_point begin;
  std::atomic<Clock::duration::rep> next_redraw = 0;
  bool drawn = false;

  void draw(Clock::time_point now) {
    const std::uint64_t done = done_bytes.load(std::memory_order_relaxed);
    const double seconds = std::chrono::duration<double>(now - begin).count();
    std::string line = fmt::format("\r\x1b[K{}  {}", phase, format_bytes(done));
    if (total_bytes > 0) {
      line += fmt::format(" of {}  {:.0f}%", format_bytes(total_bytes),
                          100.0 * static_cast<double>(done) / static_cast<double>(total_bytes));
    }
    if (seconds > 0.2) line += fmt::format("  {}/s", format_bytes(static_cast<std::uint64_t>(double(done) / seconds)));
    write(line);
    drawn = true;
  }
  static void write(const std::string& text) {
    // A terminal that was closed is not an error.
    if (::write(STDERR_FILENO, text.data(), text.size()) < 0) return;
  }
};

TerminalProgress::TerminalProgress() : state_(::isatty(STDERR_FILENO) != 0 ? new State : nullptr) {}

TerminalProgress::~TerminalProgress() {
  end();
  delete state_;
}

void TerminalProgress::begin(std::string_view phase, std::uint64_t total_bytes) {
  if (state_ == nullptr) return;
  const std::lock_guard lock(state_->mutex);
  state_->phase = phase;
  state_->total_bytes = total_bytes;
  state_->done_bytes = 0;
  state_->begin = Clock::now();
  state_->next_redraw = (state_->begin + kRedrawInterval).time_since_epoch().count();
}

void TerminalProgress::advance(std::uint64_t bytes) {
  if (state_ == nullptr) return;
  state_->done_bytes.fetch_add(bytes, std::memory_order_relaxed);
  const Clock::time_point now = Clock::now();
  if (now.time_since_epoch().count() < state_->next_redraw.load(std::memory_order_relaxed)) return;
  const std::unique_lock lock(state_->mutex, std::try_to_lock);
  if (!lock) return;
  state_->next_redraw = (now + kRedrawInterval).time_since_epoch().count();
  state_->draw(now);
}

void TerminalProgress::end() {
  if (state_ == nullptr) return;
  const std::lock_guard lock(state_->mutex);
  if (state_->drawn) State::write("\r\x1b[K");
  state_->drawn = false;
}

}  // namespace tessera
