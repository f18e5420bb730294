#pragma once
// Observation of the ops that a thread calls.

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <exception>
#include <memory>
#include <vector>

namespace tessera::fsdp {

// Told of the ops that a thread calls while an OpObserver lives there. Ops that other ops call are not told.
class OpListener {
 public:
  virtual ~OpListener() = default;
  // LibTorch discards exceptions of these functions, so they have none.
  virtual void before_op(c10::ArrayRef<const c10::IValue> inputs) noexcept = 0;
  virtual void after_op(const std::vector<c10::IValue>& outputs) noexcept = 0;
  // Called after the last op. Throws the exception that was the first to be thrown in the functions above, if any.
  virtual void finish() = 0;
  // Called instead if the ops were ended by an exception. Returns what finish() would throw.
  virtual std::exception_ptr abandon() noexcept = 0;
};

// Tells a listener of this thread's ops during its lifetime. Observers of a thread end in the
// reverse order, or together.
class OpObserver {
 public:
  explicit OpObserver(std::shared_ptr<OpListener> listener);
  ~OpObserver();
  OpObserver(const OpObserver&) = delete;
  OpObserver& operator=(const OpObserver&) = delete;

  // Returns the listeners of this thread, outermost first.
  static std::vector<std::shared_ptr<OpListener>> listeners();
};

// Hides this thread's ops from all listeners during its lifetime.
class UnobservedOps {
 public:
  UnobservedOps();
  ~UnobservedOps();
  UnobservedOps(const UnobservedOps&) = delete;
  UnobservedOps& operator=(const UnobservedOps&) = delete;
};

}  // namespace tessera::fsdp
