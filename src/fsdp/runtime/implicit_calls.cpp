#include "fsdp/runtime/implicit_calls.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "fsdp/runtime/runtime.h"
#include "tessera/base/error.h"

namespace tessera::fsdp {

namespace {

template <typename F>
void for_each_tensor_of(const c10::IValue& value, const F& f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) for_each_tensor_of(item, f);
  }
}

const void* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

}  // namespace

ImplicitCalls::ImplicitCalls(Runtime& runtime) : runtime_(runtime) {
  for (Unit* unit : runtime.units()) {
    for (const at::Tensor& param : unit->handle()->params()) units_[param.unsafeGetTensorImpl()] = unit;
    for (const at::Tensor& flat : unit->handle()->unsharded_flat_params()) units_[storage_of(flat)] = unit;
  }
}

Unit* ImplicitCalls::unit_of(const at::Tensor& tensor) const {
  auto found = units_.find(tensor.unsafeGetTensorImpl());
  if (found == units_.end()) found = units_.find(storage_of(tensor));
  return found == units_.end() ? nullptr : found->second;
}

void ImplicitCalls::find_units(c10::ArrayRef<const c10::IValue> inputs) {
  of_op_.clear();
  for (const c10::IValue& input : inputs) {
    for_each_tensor_of(input, [&](const at::Tensor& tensor) {
      Unit* unit = unit_of(tensor);
      if (unit == nullptr || unit->is_in_use()) return;
      if (std::find(of_op_.begin(), of_op_.end(), unit) == of_op_.end()) of_op_.push_back(unit);
    });
  }
}

void ImplicitCalls::before_op(c10::ArrayRef<const c10::IValue> inputs) noexcept {
  if (failure_) return;
  const UnobservedOps unobserved;
  try {
    if (c10::GradMode::is_enabled()) hook_results_without_graph();
    find_units(inputs);
    if (of_op_.empty()) return;
    end_others();
    for (Unit* unit : of_op_) begin(*unit);
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void ImplicitCalls::begin(Unit& unit) {
  const auto is_of_unit = [&](const std::shared_ptr<Call>& call) { return &call->unit == &unit; };
  if (std::any_of(open_.begin(), open_.end(), is_of_unit)) return;
  runtime_.check_implicit_call(unit);
  open_.push_back(runtime_.begin_call(unit, runtime_.records_graph(), /*is_implicit=*/true));
}

void ImplicitCalls::after_op(const std::vector<c10::IValue>& outputs) noexcept {
  if (failure_ || open_.empty()) return;
  const UnobservedOps unobserved;
  try {
    const bool has_graph = c10::GradMode::is_enabled();
    if (has_graph ? of_op_.empty() : !runtime_.records_graph()) return;
    for (const c10::IValue& output : outputs) {
      for_each_tensor_of(output, [&](const at::Tensor& result) {
        if (!has_graph) {
          without_graph_.push_back({WeakTensor(result.getIntrusivePtr()), open_});
        } else {
          for (const std::shared_ptr<Call>& call : open_) runtime_.hook_output(call, result);
        }
      });
    }
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void ImplicitCalls::hook_results_without_graph() {
  for (const WithoutGraph& kept : std::exchange(without_graph_, {})) {
    const auto impl = kept.result.lock();
    if (!impl) continue;
    const at::Tensor result(impl);
    if (!result.requires_grad() || result.is_leaf()) continue;
    for (const std::shared_ptr<Call>& call : kept.calls) runtime_.hook_node(call, node_of(result));
  }
}

// Ends the calls of units that the current op does not use.
void ImplicitCalls::end_others() {
  for (auto open = open_.begin(); open != open_.end();) {
    if (std::find(of_op_.begin(), of_op_.end(), &(*open)->unit) != of_op_.end()) {
      ++open;
      continue;
    }
    runtime_.end_call(*open);
    open = open_.erase(open);
  }
}

void ImplicitCalls::finish() {
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  const UnobservedOps unobserved;
  hook_results_without_graph();
  of_op_.clear();
  end_others();
}

std::exception_ptr ImplicitCalls::abandon() noexcept {
  const UnobservedOps unobserved;
  without_graph_.clear();
  of_op_.clear();
  for (const std::shared_ptr<Call>& call : std::exchange(open_, {})) {
    try {
      runtime_.abandon_call(call);
    } catch (...) {
      // A prefetched unit did not arrive: the group is broken, and the exception that forward threw is on its way.
    }
  }
  return std::exchange(failure_, nullptr);
}

}  // namespace tessera::fsdp
