#pragma once
// Runs of checkpointed calls, and positions.
//
// A position is a number that grows whenever a call of a unit begins or ends, in the order in which a program runs. The
// autograd engine runs nodes from the most recently created to the first, so it passes positions from the highest to
// the lowest. It repeats a checkpointed call when it passes the place where that was made. Therefore the repetition
// starts at the position where the first run did, and its calls have positions between those of the calls before it and
// after it. The backward of the repeated call passes these positions, and is a part of the backward that repeats it.
//
// A hook may call units, or compute another backward. These calls have the next positions of the program, and that
// backward is no part of the one that it interrupts.
//
// Law: no decision depends on how far apart two positions are, since ranks may be threads that share the latest one. So
// all positions of a repetition precede the next one of the program.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "fsdp/autograd.h"

namespace tessera::fsdp {

// A run of a checkpointed call, during its lifetime: the first one, which records no graph, or its repetition, which
// includes the backward of the repeated call. Runs of a thread end in the reverse order.
class CheckpointedRun {
 public:
  enum class Kind { first, repetition };
  // `begin`, of a repetition: the position where the first run began.
  explicit CheckpointedRun(Kind kind, std::uint64_t begin = 0)
      : position_(begin), outer_(innermost), is_first_(kind == Kind::first), repetition_(repetition()) {
    if (!is_first_) {
      CheckpointedRun* const outer = std::exchange(repetition_, this);
      repeating_ = current_backward();
      const bool is_inside = outer != nullptr && outer->repeated_ == repeating_;
      outermost_ = is_inside ? outer->outermost_ : this;
    }
    if (outermost_ == this) {
      ends_ = std::make_shared<std::vector<std::function<void()>>>();
      at_end_of_backward([ends = ends_] {
        for (const std::function<void()>& end : *ends) end();
      });
    }
    innermost = this;
  }
  ~CheckpointedRun() { innermost = outer_; }
  CheckpointedRun(const CheckpointedRun&) = delete;
  CheckpointedRun& operator=(const CheckpointedRun&) = delete;

  // Returns whether the innermost run of this thread is a first one.
  static bool is_first() { return innermost != nullptr && innermost->is_first_; }
  // Returns whether this thread repeats a call, in which it may run others for the first time. False in the backward of
  // the repeated call, and in what hooks do there.
  static bool is_repeating() {
    const CheckpointedRun* const run = repetition();
    return run != nullptr && run->repeating_ == current_backward();
  }
  // Notes that the current backward is that of the call that was repeated last.
  static void note_backward() {
    CheckpointedRun* const run = repetition();
    if (run != nullptr && run->repeated_ == nullptr) run->repeated_ = current_backward();
  }

  // Returns the position that this thread has come to.
  static std::uint64_t position() { return is_repeating() ? repetition()->position_ : latest.load(); }
  // Returns the next position, which this thread has come to then.
  static std::uint64_t advance() {
    return is_repeating() ? ++repetition()->position_ : latest += kPositionsOfRepetition;
  }

  // Identifies the backward that this thread computes: the one that repeats calls rather than those of repeated calls.
  static const void* outermost_backward() {
    const CheckpointedRun* const run = of_current_backward();
    return run != nullptr ? run->outermost_->repeating_ : current_backward();
  }
  // Calls `f` at the end of that backward. May be called only during backward.
  static void at_end_of_outermost_backward(std::function<void()> f) {
    const CheckpointedRun* const run = of_current_backward();
    if (run == nullptr) return at_end_of_backward(std::move(f));
    run->outermost_->ends_->push_back(std::move(f));
  }

 private:
  static inline thread_local CheckpointedRun* innermost = nullptr;
  static constexpr std::uint64_t kPositionsOfRepetition = std::uint64_t{1} << 20;
  static inline std::atomic<std::uint64_t> latest = 0;

  // Returns the innermost repetition of this thread, null if there is none.
  static CheckpointedRun* repetition() { return innermost != nullptr ? innermost->repetition_ : nullptr; }
  // Returns it if the current backward repeats the call, or is that of the repeated one.
  static const CheckpointedRun* of_current_backward() {
    const CheckpointedRun* const run = repetition();
    const void* const current = current_backward();
    return run != nullptr && (current == run->repeating_ || current == run->repeated_) ? run : nullptr;
  }

  std::uint64_t position_;  // of a repetition
  CheckpointedRun* outer_;
  bool is_first_;
  CheckpointedRun* repetition_;  // the innermost repetition that this is in, or is
  // Of a repetition: the backward that repeats the call, and that of the repeated call once that has begun.
  const void *repeating_ = nullptr, *repeated_ = nullptr;
  CheckpointedRun* outermost_ = nullptr;  // the outermost one that it is in without any other backward in between
  std::shared_ptr<std::vector<std::function<void()>>> ends_;
};

}  // namespace tessera::fsdp
