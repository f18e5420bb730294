#include "fsdp/runtime/op_observer.h"

#include <utility>

namespace tessera::fsdp {

namespace {

struct Thread {
  std::vector<std::shared_ptr<OpListener>> listeners;
  at::CallbackHandle callback = 0;  // while there are listeners
  int unobserved = 0;
  int depth = 0;  // of ops that call ops
};
thread_local Thread this_thread;

// Kept by LibTorch from the start of an op to its end.
struct Op : at::ObserverContext {
  Op() { ++this_thread.depth; }
  ~Op() override { --this_thread.depth; }
  Op(const Op&) = delete;
  Op& operator=(const Op&) = delete;
};

bool is_observed() { return this_thread.unobserved == 0 && this_thread.depth == 0; }

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& op) {
  if (!op.operator_name()) return nullptr;  // a range that the user records, around any number of ops
  if (is_observed()) {
    for (const auto& listener : this_thread.listeners) listener->before_op(op.inputs());
  }
  return std::make_unique<Op>();
}

void on_end(const at::RecordFunction& op, at::ObserverContext* context) {
  if (context == nullptr || this_thread.unobserved != 0 || this_thread.depth != 1) return;
  for (const auto& listener : this_thread.listeners) listener->after_op(op.outputs());
}

}  // namespace

OpObserver::OpObserver(std::shared_ptr<OpListener> listener) {
  if (this_thread.listeners.empty()) {
    this_thread.callback = at::addThreadLocalCallback(at::RecordFunctionCallback(on_start, on_end)
                                                          .needsInputs(true)
                                                          .needsOutputs(true)
                                                          .scopes({at::RecordScope::FUNCTION}));
  }
  this_thread.listeners.push_back(std::move(listener));
}

OpObserver::~OpObserver() {
  this_thread.listeners.pop_back();
  if (this_thread.listeners.empty()) at::removeCallback(this_thread.callback);
}

std::vector<std::shared_ptr<OpListener>> OpObserver::listeners() { return this_thread.listeners; }

UnobservedOps::UnobservedOps() { ++this_thread.unobserved; }
UnobservedOps::~UnobservedOps() { --this_thread.unobserved; }

}  // namespace tessera::fsdp
