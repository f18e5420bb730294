#pragma once
// What the pointers of the C interface point to.

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "tessera/base/cancellation.h"
#include "tessera/base/progress.h"
#include "tessera/c/tessera.h"
#include "tessera/checkpoint/checkpoint.h"

struct tessera_bytes {
  explicit tessera_bytes(std::string bytes_in) : bytes(std::move(bytes_in)) {}
  std::string bytes;
};

struct tessera_checkpoint {
  explicit tessera_checkpoint(std::shared_ptr<const tessera::checkpoint::Checkpoint> opened)
      : checkpoint(std::move(opened)) {}
  std::shared_ptr<const tessera::checkpoint::Checkpoint> checkpoint;
};

struct tessera_task final : tessera::ProgressSink {
  void begin(std::string_view, std::uint64_t total) override {
    done_bytes = 0;
    total_bytes = total;
  }
  void advance(std::uint64_t bytes) override { done_bytes.fetch_add(bytes, std::memory_order_relaxed); }
  void end() override { done_bytes = total_bytes.load(); }

  tessera::Cancellation cancellation;
  std::atomic<std::uint64_t> done_bytes = 0, total_bytes = 0;
};

namespace tessera::c {

// Sets `progress` and `cancellation` in the options of an operation.
template <typename Options>
void observe(tessera_task* task, Options& options) {
  if (task == nullptr) return;
  task->cancellation.check();
  options.progress = task;
  options.cancellation = &task->cancellation;
}

}  // namespace tessera::c
