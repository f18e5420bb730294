#pragma once
// Which runs of checkpointed calls a thread is in.

#include <torch/nn/module.h>

namespace tessera::fsdp {

// A run of a checkpointed call, during its lifetime: the first one, which records no graph, or its repetition, which
// includes the backward of the repeated call.
class CheckpointedRun {
 public:
  enum class Kind { first, repetition };
  // `module` is the one whose forward is the call, or null.
  CheckpointedRun(Kind kind, const torch::nn::Module* module) : kind_(kind), module_(module), outer_(innermost) {
    innermost = this;
  }
  ~CheckpointedRun() { innermost = outer_; }
  CheckpointedRun(const CheckpointedRun&) = delete;
  CheckpointedRun& operator=(const CheckpointedRun&) = delete;

  const torch::nn::Module* module() const { return module_; }
  // Returns the innermost run of this thread, null if there is none or it is a repetition.
  static const CheckpointedRun* first() {
    return innermost != nullptr && innermost->is(Kind::first) ? innermost : nullptr;
  }
  // Returns whether the innermost run of this thread is a repetition.
  static bool is_repeating() { return innermost != nullptr && innermost->is(Kind::repetition); }

 private:
  bool is(Kind kind) const { return kind_ == kind; }

  static inline thread_local const CheckpointedRun* innermost = nullptr;
  Kind kind_;
  const torch::nn::Module* module_;
  const CheckpointedRun* outer_;
};

}  // namespace tessera::fsdp
