// The gradient of a flat parameter: from the parameters, over the ranks, to the shard.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "fsdp/flat_param/storage.h"
#include "tessera/base/error.h"
#include "tessera/fsdp/flat_param_handle.h"

namespace tessera::fsdp {

namespace {

// Dividing by it before the sum, and by the rest after it, keeps a sum of low precision from overflowing and its parts
// from vanishing; what is precise is divided once, after it, where there is less of it.
// PyTorch: DefaultState._get_gradient_predivide_factor.
int predivide_factor(int ranks, at::ScalarType dtype) {
  if (c10::elementSize(dtype) > 2) return 1;
  int factor = 1;
  while (ranks % factor == 0 && ranks / factor > factor) factor *= 2;
  return factor;
}

}  // namespace

// Where parameter `i` has its elements while sharded, in something as long as a shard.
at::Tensor FlatParamHandle::sharded_view_of(const at::Tensor& shard, std::size_t i) const {
  return is_sharded(options_.strategy) ? piece_of(shard, i) : view_of(shard, i);
}

// What is to be seen as the gradient of parameter `i` outside of a backward: undefined for none. No view to autograd,
// which LibTorch's zero_grad of 1.13 wouldn't take.
at::Tensor FlatParamHandle::visible_gradient(std::size_t i) const {
  if (has_[i].unsharded) return view_of(unsharded_grad_, i).detach();
  if (!has_[i].sharded) return {};
  return sharded_view_of(sharded_grad_, i).detach();
}

void FlatParamHandle::prepare_gradient_for_backward() {
  const c10::NoGradGuard no_grad;
  if (!options_.use_orig_params) {
    if (!flat_param_.grad().defined()) drop_gradient();
    flat_param_.mutable_grad().reset();
    return;
  }
  for (std::size_t i = 0; i < params_.size(); ++i) {
    at::Tensor& grad = params_[i].mutable_grad();
    const at::Tensor ours = visible_gradient(i);
    if (ours.defined() && !grad.defined()) {
      if (sharded_grad_.defined()) sharded_view_of(sharded_grad_, i).zero_();
      has_[i] = {};
    } else if (grad.defined() && !(ours.defined() && grad.is_alias_of(ours))) {
      put_gradient(i, grad);
    }
    grad.reset();
  }
  if (std::none_of(has_.begin(), has_.end(), [](HasGradient has) { return has.unsharded; })) unsharded_grad_.reset();
  if (std::none_of(has_.begin(), has_.end(), [](HasGradient has) { return has.sharded; })) sharded_grad_.reset();
}

void FlatParamHandle::drop_gradient() {
  sharded_grad_.reset();
  unsharded_grad_.reset();
  has_.assign(params_.size(), {});
}

// Somebody's own for a sharded parameter.
void FlatParamHandle::put_gradient(std::size_t i, const at::Tensor& grad) {
  if (grad.numel() != sharded_views_[i].numel()) {
    fail(ErrorCode::invalid_argument,
         "parameter '{}' was given a gradient of {} elements while it was sharded, expected the {} that this rank has",
         printable(layout_.params()[i].fqn), grad.numel(), sharded_views_[i].numel());
  }
  if (!sharded_grad_.defined()) sharded_grad_ = at::zeros_like(flat_param_);
  const at::Tensor place = sharded_view_of(sharded_grad_, i);
  place.copy_(grad.detach().reshape(place.sizes()));
  has_[i] = {false, true};
}

void FlatParamHandle::take_gradient(std::size_t i) {
  at::Tensor& grad = params_[i].mutable_grad();
  if (!grad.defined()) return;
  if (grad.requires_grad()) {
    fail(ErrorCode::unsupported, "the gradient of '{}' needs a gradient itself, and FSDP has none of gradients",
         printable(layout_.params()[i].fqn));
  }
  const c10::NoGradGuard no_grad;
  if (!unsharded_grad_.defined()) {
    unsharded_grad_ =
        empty_flat(layout_.padded_unsharded_numel(), at::TensorOptions().dtype(compute_dtype_).device(options_.device));
  }
  const at::Tensor place = view_of(unsharded_grad_, i);
  if (has_[i].unsharded) {
    place.add_(grad);
  } else {
    place.copy_(grad);
  }
  has_[i].unsharded = true;
  grad.reset();
}

// The parts of the unsharded gradient that nothing was taken for.
void FlatParamHandle::zero_the_rest() {
  if (!unsharded_grad_.defined()) {
    unsharded_grad_ = at::zeros({layout_.padded_unsharded_numel()},
                                at::TensorOptions().dtype(compute_dtype_).device(options_.device));
    return;
  }
  std::size_t param = 0;
  std::int64_t offset = 0;
  for (std::size_t part = 0; part < layout_.is_padding().size(); ++part) {
    const std::int64_t numel = layout_.numels_with_padding()[part];
    if (layout_.is_padding()[part] || !has_[param].unsharded) unsharded_grad_.narrow(0, offset, numel).zero_();
    if (!layout_.is_padding()[part]) ++param;
    offset += numel;
  }
  unsharded_grad_.narrow(0, offset, unsharded_grad_.numel() - offset).zero_();
}

int FlatParamHandle::averaged_ranks() const {
  return group_.size() * (options_.replicas ? options_.replicas->size() : 1);
}

void FlatParamHandle::start_reduce_gradient() {
  const c10::NoGradGuard no_grad;
  zero_the_rest();
  reducing_ = std::exchange(unsharded_grad_, at::Tensor()).to(reduce_dtype_);
  for (HasGradient& has : has_) has.unsharded = false;
  if (const int factor = predivide_factor(averaged_ranks(), reduce_dtype_); factor != 1) reducing_.div_(factor);
  if (switches_.fakes_reduce) {
    reduced_ = my_part_of(reducing_).clone();
  } else if (is_sharded(options_.strategy)) {
    reduced_ = empty_flat(layout_.sharded_numel(), reducing_.options());
    reduction_ = group_.start_reduce_scatter_into(reduced_, reducing_);
  } else {
    reduced_ = reducing_;
    reduction_ = group_.start_all_reduce(reduced_);
  }
}

void FlatParamHandle::finish_reduce_gradient() {
  if (!reduced_.defined()) return;
  const c10::NoGradGuard no_grad;
  reduction_.wait();
  reducing_.reset();
  if (options_.replicas) options_.replicas->all_reduce(reduced_);
  const double ranks = averaged_ranks();
  if (const double factor = ranks / predivide_factor(averaged_ranks(), reduce_dtype_); factor != 1)
    reduced_.div_(factor);
  const at::Tensor grad = std::exchange(reduced_, at::Tensor()).to(flat_param_.device(), flat_param_.scalar_type());
  if (sharded_grad_.defined()) {
    sharded_grad_ = sharded_grad_.to(flat_param_.scalar_type()).add_(grad);  // it may be of low precision
  } else {
    sharded_grad_ = grad;
  }
  for (std::size_t i = 0; i < params_.size(); ++i) has_[i].sharded = params_[i].requires_grad();
}

void FlatParamHandle::prepare_gradient_for_optim() {
  const c10::NoGradGuard no_grad;
  if (options_.mixed_precision.keep_low_precision_grads && sharded_grad_.defined()) {
    sharded_grad_ = sharded_grad_.to(compute_dtype_);
  }
  if (!options_.use_orig_params) {
    flat_param_.mutable_grad() = unsharded_grad_.defined() ? unsharded_grad_ : sharded_grad_;
    return;
  }
  for (std::size_t i = 0; i < params_.size(); ++i) params_[i].mutable_grad() = visible_gradient(i);
}

void FlatParamHandle::unshard_grad() {
  const c10::NoGradGuard no_grad;
  at::Tensor has = at::zeros({static_cast<std::int64_t>(params_.size())}, at::kInt);
  group_.agree_on("put gradients together", [&] {
    for (std::size_t i = 0; i < params_.size(); ++i) {
      if (has_[i].unsharded) {
        fail(ErrorCode::invalid_argument, "the gradient of '{}' was not reduced, expected a backward without no_sync",
             printable(layout_.params()[i].fqn));
      }
      if (sharded_grad_.defined() && has_[i].sharded) has[static_cast<std::int64_t>(i)] = 1;
    }
  });
  group_.all_reduce(has, ReduceOp::max);
  if (has.max().item<int>() == 0) return;
  const at::ScalarType dtype =
      options_.mixed_precision.keep_low_precision_grads ? compute_dtype_ : flat_param_.scalar_type();
  const at::Tensor mine = sharded_grad_.defined() ? sharded_grad_.to(options_.device, dtype)
                                                  : at::zeros({layout_.sharded_numel()},
                                                              at::TensorOptions().dtype(dtype).device(options_.device));
  at::Tensor whole = mine;
  if (is_sharded(options_.strategy)) {
    whole = at::empty({layout_.padded_unsharded_numel()}, mine.options());
    group_.all_gather_into(whole, mine);
  }
  for (std::size_t i = 0; i < params_.size(); ++i) {
    if (has[static_cast<std::int64_t>(i)].item<int>() != 0) params_[i].mutable_grad() = view_of(whole, i);
  }
}

}  // namespace tessera::fsdp
