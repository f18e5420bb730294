#include "cli/interruption.h"

#include <csignal>

namespace tessera::cli {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};

constinit Cancellation stop_requested;

extern "C" void request_stop(int) {
  stop_requested.request();
  for (const int signal : kSignals) std::signal(signal, SIG_DFL);
}

}  // namespace

const Cancellation& interruption() { return stop_requested; }

const Cancellation& watch_signals() {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a write beyond the limit of file sizes is an error that is reported
  struct sigaction action {};
  action.sa_handler = request_stop;
  // The others are blocked while one is handled, so that a second one meets the default action.
  for (const int signal : kSignals) sigaddset(&action.sa_mask, signal);
  for (const int signal : kSignals) {
    struct sigaction before {};
    // A signal that the parent ignores (nohup, a background job) stays ignored.
    if (::sigaction(signal, nullptr, &before) == 0 && before.sa_handler == SIG_IGN) continue;
    ::sigaction(signal, &action, nullptr);
  }
  return stop_requested;
}

}  // namespace tessera::cli
