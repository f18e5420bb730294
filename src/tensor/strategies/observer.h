#pragma once
// Observers of the calls of ops: what tessera/tensor/dtensor/op_calls.h and rule_check.h are made of.

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tensor/strategies/choose.h"

namespace tessera {

using ComputeResults = FunctionRef<std::vector<at::Tensor>(std::span<const DTensor> inputs)>;

// A call of an op, before its inputs are redistributed.
struct ObservedCall {
  const std::string& op;
  std::span<const DTensor> inputs;
  PlacementRuleRef rule_of;  // what gave the rule
  const OpRule& rule;
  const OpChoice& choice;
  ComputeResults compute;  // on inputs as a strategy places them; returns the local results
  bool is_in_place;
};

class OpObserver {
 public:
  virtual ~OpObserver() = default;
  virtual void observe(const ObservedCall& call) = 0;
};

// The observer of this thread's calls; null if there is none.
OpObserver*& op_observer();

// Sets the observer of this thread while it exists.
class ObserverScope {
 public:
  explicit ObserverScope(OpObserver* observer) : outer_(std::exchange(op_observer(), observer)) {}
  ~ObserverScope() { op_observer() = outer_; }
  ObserverScope(const ObserverScope&) = delete;
  ObserverScope& operator=(const ObserverScope&) = delete;

 private:
  OpObserver* outer_;
};

}  // namespace tessera
