#include "tessera/base/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
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
  // Of the last redraw, and the rate since then, of which older ones count less and less.
  Clock::time_point last;
  std::uint64_t last_bytes = 0;
  double rate = 0;  // bytes per second

  void measure(Clock::time_point now, std::uint64_t done) {
    constexpr double kMemorySeconds = 3;
    const double seconds = std::chrono::duration<double>(now - last).count();
    if (seconds <= 0) return;
    const double weight = last_bytes == 0 ? 1 : 1 - std::exp(-seconds / kMemorySeconds);
    rate += weight * (static_cast<double>(done - std::min(done, last_bytes)) / seconds - rate);
    last = now;
    last_bytes = done;
  }

  void draw(Clock::time_point now) {
    const std::uint64_t done = done_bytes.load(std::memory_order_relaxed);
    const double seconds = std::chrono::duration<double>(now - begin).count();
    measure(now, done);
    const std::size_t columns = terminal_columns();
    std::string line = fmt::format("{}  {}", phase, format_bytes(done));
    // What does not fit is left out: a line that wraps cannot be redrawn.
    const auto add = [&](const std::string& part) {
      if (line.size() + part.size() < columns) line += part;
    };
    if (total_bytes > 0) {
      add(fmt::format(" of {}", format_bytes(total_bytes)));
      add(fmt::format("  {:.0f}%", 100.0 * static_cast<double>(done) / static_cast<double>(total_bytes)));
    }
    if (seconds > 0.2) add(fmt::format("  {}/s", format_bytes(static_cast<std::uint64_t>(double(done) / seconds))));
    if (seconds > 2 && total_bytes > done && rate >= 1) {
      add(fmt::format("  {} left", duration(static_cast<double>(total_bytes - done) / rate)));
    }
    line.resize(std::min(line.size(), columns - 1));
    line.insert(0, "\r\x1b[K");
    write(line);
    drawn = true;
  }
  static std::size_t terminal_columns() {
    winsize size{};
    return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col : 80;
  }
  // "7 s", "3:05", "2:03:05"
  static std::string duration(double seconds) {
    if (seconds > 360000) return "over 100 h";
    const auto all = static_cast<std::int64_t>(std::llround(seconds));
    if (all < 60) return fmt::format("{} s", all);
    if (all < 3600) return fmt::format("{}:{:02}", all / 60, all % 60);
    return fmt::format("{}:{:02}:{:02}", all / 3600, all / 60 % 60, all % 60);
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
  state_->begin = state_->last = Clock::now();
  state_->last_bytes = 0;
  state_->rate = 0;
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
