#pragma once
// Runs of checkpointed calls, and positions.
//
// A position is a number that grows whenever a call of a unit begins or ends, in the order in which a program runs. The
// autograd engine runs nodes from the most recently created to the first, so it passes positions from the highest to
// the lowest. It repeats a checkpointed call when it passes the place where that was made. Therefore the repetition
// starts at the position where the first run did, and its calls have positions between those of the calls before it and
// after it.
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
      : kind_(kind),
        position_(begin),
        outer_(innermost),
        repetition_(kind == Kind::repetition ? this
                    : outer_ != nullptr      ? outer_->repetition_
                                             : nullptr),
        outermost_(outer_ != nullptr && outer_->outermost_ != nullptr ? outer_->outermost_ : repetition_) {
    if (outermost_ == this) {
      backward_ = current_backward();
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
  static bool is_first() { return innermost != nullptr && innermost->kind_ == Kind::first; }
  // Returns whether this thread repeats a call, in which it may run others for the first time.
  static bool is_in_repetition() { return innermost != nullptr && innermost->repetition_ != nullptr; }

  // Returns the position that this thread has come to.
  static std::uint64_t position() { return is_in_repetition() ? innermost->repetition_->position_ : latest.load(); }
  // Returns the next position, which this thread has come to then.
  static std::uint64_t advance() {
    return is_in_repetition() ? ++innermost->repetition_->position_ : latest += kPositionsOfRepetition;
  }

  // Identifies the backward that this thread computes, the one that repeats calls rather than those of repeated calls.
  static const void* outermost_backward() {
    return is_in_repetition() ? innermost->outermost_->backward_ : current_backward();
  }
  // Calls `f` at the end of that backward. May be called only during backward.
  static void at_end_of_outermost_backward(std::function<void()> f) {
    if (!is_in_repetition()) return at_end_of_backward(std::move(f));
    innermost->outermost_->ends_->push_back(std::move(f));
  }

 private:
  static inline thread_local CheckpointedRun* innermost = nullptr;
  static constexpr std::uint64_t kPositionsOfRepetition = std::uint64_t{1} << 20;
  static inline std::atomic<std::uint64_t> latest = 0;

  Kind kind_;
  std::uint64_t position_;  // of a repetition
  CheckpointedRun* outer_;
  CheckpointedRun *repetition_, *outermost_;  // the innermost and the outermost repetition that this is in, or is
  const void* backward_ = nullptr;            // of the outermost repetition: what repeats it
  std::shared_ptr<std::vector<std::function<void()>>> ends_;
};

}  // namespace tessera::fsdp
