#include "fsdp/runtime/unit.h"

#include <algorithm>
#include <utility>

#include "fsdp/runtime/checkpointed_run.h"
#include "fsdp/runtime/runtime.h"
#include "tessera/base/error.h"

namespace tessera::fsdp {

void Wrappable::check_not_sharded(std::string_view function, bool permitted_when_summoned) const {
  if (unit_ == nullptr || (permitted_when_summoned && unit_->is_summoned)) return;
  fail(ErrorCode::invalid_argument, "{}: module '{}' is sharded, expected {}", function, printable(unit_->name()),
       permitted_when_summoned ? "the call in summon_full_params, or the state dict of the FullyShardedDataParallel"
                               : "the conversion before the model is sharded");
}

void Wrappable::refuse_checkpoint(const torch::nn::Module& module) {
  fail(ErrorCode::unsupported,
       "forward of a {}: apply_activation_checkpointing selected it, but an argument may share more than tensors with "
       "its copy, expected values and tensors or a module in a Checkpointed, or the result is a reference or none, "
       "expected a value",
       module.name());
}

Unit::Unit(Runtime& runtime, std::string name, std::unique_ptr<FlatParamHandle> handle, torch::nn::Module& module)
    : runtime_(&runtime),
      name_(std::move(name)),
      handle_(std::move(handle)),
      module_(module),
      wrappable_(dynamic_cast<Wrappable*>(&module)) {
  if (wrappable_ != nullptr) wrappable_->unit_ = this;
  if (!handle_) return;
  handle_->use_streams(runtime.streams());
  renew_accumulators();
  use_accumulators(false);
}

std::string Unit::quoted_name() const {
  return name_.empty() ? "the model itself" : fmt::format("'{}'", printable(name_));
}

Unit::~Unit() {
  if (wrappable_ != nullptr) wrappable_->unit_ = nullptr;
  link_->unit = nullptr;
}

void Unit::move_to(Runtime& runtime, std::string name, const std::string& prefix) {
  runtime_ = &runtime;
  name_ = std::move(name);
  handle_->add_prefix(prefix);
  handle_->use_full_precision(false);
  handle_->use_streams(runtime.streams());
  calls.clear();
  renew_accumulators();
  use_accumulators(false);
}

void Unit::hook_accumulators() {
  const std::vector<at::Tensor>& params = handle_->params();
  hooked_.resize(params.size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (!params[i].requires_grad()) continue;
    const GraphNode node = torch::autograd::impl::grad_accumulator(params[i]);
    if (std::exchange(hooked_[i], node) == node) continue;
    after_node(node, [link = link_, i] {
      if (link->unit != nullptr) link->unit->on_gradient(i);
    });
  }
}

void Unit::renew_accumulators() {
  hooked_.clear();
  use_accumulators(true);
  handle_->with_unsharded_shapes([this] { hook_accumulators(); });
}

void Unit::use_accumulators(bool on) {
  const std::vector<at::Tensor>& params = handle_->params();
  hooked_.resize(params.size());
  refusing_.resize(params.size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (!params[i].requires_grad()) continue;
    if (on) {
      set_accumulator(params[i], hooked_[i]);
      continue;
    }
    if (!refusing_[i]) {
      set_accumulator(params[i], GraphNode());
      refusing_[i] = torch::autograd::impl::grad_accumulator(params[i]);
      before_node(refusing_[i], link_, [link = link_, i] {
        if (link->unit != nullptr) link->unit->refuse_gradient(i);
      });
    }
    set_accumulator(params[i], refusing_[i]);
  }
}

void Unit::refuse_gradient(std::size_t param) const {
  fail(ErrorCode::invalid_argument,
       "backward: a gradient reached parameter '{}' of unit '{}' outside of any call of the unit, expected that the "
       "parameter is used in forward of the FullyShardedDataParallel only, by the thread that called it",
       printable(handle_->layout().params()[param].fqn), printable(name_));
}

void Unit::on_gradient(std::size_t param) {
  const OnComputation on(*runtime_->streams());
  if (open_calls.empty()) {
    handle_->params()[param].mutable_grad().reset();
    refuse_gradient(param);
  }
  handle_->take_gradient(param);
}

// In backward, that is also a call that contains the checkpointed one which is repeated.
bool Unit::is_in_use() const {
  const auto is_inside = [](const std::shared_ptr<Call>& call) { return call->begin <= CheckpointedRun::position(); };
  return !running_calls.empty() || std::any_of(open_calls.begin(), open_calls.end(), is_inside);
}

}  // namespace tessera::fsdp
