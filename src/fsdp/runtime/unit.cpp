#include "fsdp/runtime/unit.h"

#include <algorithm>
#include <utility>

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
       "its copy, or the result is a reference or none, expected values and tensors, or a module in a Checkpointed",
       module.name());
}

Unit::Unit(Runtime& runtime, std::string name, std::unique_ptr<FlatParamHandle> handle, torch::nn::Module& module)
    : ahead(std::make_shared<char>()),
      runtime_(&runtime),
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
  ahead = std::make_shared<char>();
  renew_accumulators();
  use_accumulators(false);
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
  hooked_.resize(params.size());
  for (std::size_t k = 0; k < now->nodes.size(); ++k) {
    const Accumulator& node = now->nodes[k];
    const std::size_t param = now->params[k];
    if (std::exchange(hooked_[param], node) == node) continue;
    after_node(node, [link = link_, id = node.get(), param] {
      if (link->unit != nullptr) link->unit->on_gradient(id, param);
    });
  }
  in_graphs_.erase(
      std::remove_if(in_graphs_.begin(), in_graphs_.end(), [](const auto& other) { return other.expired(); }),
      in_graphs_.end());
  in_graphs_.push_back(now);
  return accumulators_ = now;
}

void Unit::renew_accumulators() {
  accumulators_.reset();
  use_accumulators(true);
  handle_->with_unsharded_shapes([this] { accumulators(); });
}

void Unit::use_accumulators(bool on) {
  const std::vector<at::Tensor>& params = handle_->params();
  refusing_.resize(params.size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (!params[i].requires_grad()) continue;
    if (!refusing_[i] || on) set_accumulator(params[i], Accumulator());
    if (on) continue;
    if (!refusing_[i]) {
      refusing_[i] = torch::autograd::impl::grad_accumulator(params[i]);
      before_node(refusing_[i], [link = link_, i] {
        if (link->unit != nullptr) link->unit->refuse_gradient(i);
      });
    }
    set_accumulator(params[i], refusing_[i]);
  }
  if (!on || !accumulators_) return;
  for (std::size_t k = 0; k < accumulators_->nodes.size(); ++k) {
    set_accumulator(params[accumulators_->params[k]], accumulators_->nodes[k]);
  }
}

void Unit::refuse_gradient(std::size_t param) const {
  fail(ErrorCode::invalid_argument,
       "backward: a gradient reached parameter '{}' of unit '{}' outside of any call of the unit, expected that the "
       "parameter is used in forward of the FullyShardedDataParallel only, by the thread that called it",
       printable(handle_->layout().params()[param].fqn), printable(name_));
}

void Unit::on_gradient(const void* node, std::size_t param) {
  const OnComputation on(*runtime_->streams());
  if (open_calls.empty()) {
    handle_->params()[param].mutable_grad().reset();
    refuse_gradient(param);
  }
  handle_->take_gradient(param);
  bool is_last = false;
  for (const std::weak_ptr<Accumulators>& each : in_graphs_) {
    const std::shared_ptr<Accumulators> awaited = each.lock();
    if (!awaited || awaited->backward != runtime_->backward() || awaited->waiting == 0) continue;
    const auto found = std::lower_bound(awaited->params.begin(), awaited->params.end(), param);
    if (found == awaited->params.end() || *found != param) continue;
    if (awaited->nodes[static_cast<std::size_t>(found - awaited->params.begin())].get() != node) continue;
    is_last = --awaited->waiting == 0 || is_last;
  }
  if (is_last) runtime_->complete_done_units();
}

bool Unit::is_done() const {
  return std::all_of(open_calls.begin(), open_calls.end(), [](const std::shared_ptr<Call>& call) {
    return call->tells_end && call->accumulators && call->accumulators->tells_end && call->accumulators->waiting == 0;
  });
}

}  // namespace tessera::fsdp
