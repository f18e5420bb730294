#include "fsdp/runtime/unit.h"

#include <algorithm>

#include "fsdp/runtime/runtime.h"

namespace tessera::fsdp {

Unit::Unit(Runtime& runtime, std::string name, std::unique_ptr<FlatParamHandle> handle, Wrappable* module)
    : runtime_(runtime), name_(std::move(name)), handle_(std::move(handle)), module_(module) {
  if (module_ != nullptr) module_->unit_ = this;
}

Unit::~Unit() {
  if (module_ != nullptr) module_->unit_ = nullptr;
  link_->unit = nullptr;
}

std::shared_ptr<Accumulators> Unit::accumulators() {
  auto now = std::make_shared<Accumulators>();
  const std::vector<at::Tensor>& params = handle_->params();
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (params[i].requires_grad()) {
      now->params.push_back(i);
      now->nodes.push_back(torch::autograd::impl::grad_accumulator(params[i]));
    } else {
      now->tells_end = false;  // gradients that pass through the parameter may be computed last
    }
  }
  if (now->nodes.empty()) return nullptr;
  if (accumulators_ && accumulators_->nodes == now->nodes && accumulators_->tells_end == now->tells_end) {
    return accumulators_;
  }
  const std::weak_ptr<Accumulators> awaited = now;
  for (std::size_t k = 0; k < now->nodes.size(); ++k) {
    after_node(now->nodes[k], [link = link_, awaited, param = now->params[k]] {
      const std::shared_ptr<Accumulators> found = awaited.lock();
      if (link->unit != nullptr && found) link->unit->on_gradient(*found, param);
    });
  }
  return accumulators_ = now;
}

void Unit::on_gradient(Accumulators& accumulators, std::size_t param) {
  handle_->take_gradient(param);
  if (accumulators.backward != runtime_.backward() || accumulators.waiting == 0) return;
  if (--accumulators.waiting == 0) runtime_.complete_done_units();
}

bool Unit::is_done() const {
  return std::all_of(open_calls.begin(), open_calls.end(), [](const std::shared_ptr<Call>& call) {
    return call->accumulators && call->accumulators->tells_end && call->accumulators->waiting == 0;
  });
}

}  // namespace tessera::fsdp
