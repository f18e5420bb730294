#include "fsdp/flat_param/gradient.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "fsdp/environment.h"
#include "fsdp/flat_param/storage.h"
#include "fsdp/warn.h"
#include "tessera/base/error.h"
#include "tessera/comm/internal/shared_memory.h"

namespace tessera::fsdp {

namespace {

// Gradients are divided by this factor before the sum over the ranks and by the rest after it, so that a sum in low
// precision does not overflow and its terms do not vanish. With higher precision there is one division, after the
// reduction, where there are fewer elements. PyTorch: DefaultState._get_gradient_predivide_factor.
int predivide_factor(int ranks, at::ScalarType dtype) {
  if (c10::elementSize(dtype) > 2) return 1;
  int factor = 1;
  while (ranks % factor == 0 && ranks / factor > factor) factor *= 2;
  return factor;
}

}  // namespace

FlatParamGradient::FlatParamGradient(const FlatParamHandle& handle)
    : handle_(handle),
      fakes_reduce_(is_set("FSDP_USE_FAKE_REDUCE")),
      keeps_pieces_(handle.shares_memory() && handle.options().use_orig_params &&
                    handle.options().extensions == nullptr),
      pieces_(handle.params().size()),
      has_(handle.params().size()) {
  const MixedPrecision& mixed = handle.options().mixed_precision;
  if (fakes_reduce_)
    warn_once("FSDP_USE_FAKE_REDUCE=1: gradients are not reduced, and training results are meaningless");
  reduce_dtype_ = mixed.reduce_dtype.value_or(mixed.param_dtype.value_or(handle.flat_param().scalar_type()));
}

// The gradient of a parameter as seen outside of backward, undefined for none. Detached, because zero_grad of LibTorch
// 1.13 does not accept a view.
at::Tensor FlatParamGradient::visible(std::size_t param) const {
  if (has_[param].unsharded)
    return keeps_pieces_ ? pieces_[param].detach() : handle_.view_of(unsharded_, param).detach();
  if (!has_[param].sharded) return {};
  return handle_.sharded_view_of(sharded_, param).detach();
}

void FlatParamGradient::expect_no_reduction(std::string_view function) const {
  if (inputs_.empty()) return;
  fail(ErrorCode::invalid_argument,
       "{}: a reduction of the gradient of '{}' is pending, expected a call of finish_reduce_gradient before", function,
       printable(handle_.layout().params()[0].fqn));
}

void FlatParamGradient::set_comm_hook(CommHook hook) {
  expect_no_reduction("set_comm_hook");
  comm_hook_ = std::move(hook);
}

void FlatParamGradient::prepare_for_backward() {
  adopt_visible();
  if (!handle_.options().use_orig_params) {
    handle_.flat_param().mutable_grad().reset();
  } else {
    for (const at::Tensor& param : handle_.params()) param.mutable_grad().reset();
  }
  for (std::size_t i = 0; i < has_.size(); ++i) {
    has_[i].awaited = has_[i].awaited || handle_.params()[i].requires_grad();
  }
}

void FlatParamGradient::drop_reset() {
  expect_no_reduction("drop_reset_gradients");
  const c10::NoGradGuard no_grad;
  land();
  if (!handle_.options().use_orig_params) {
    if (!handle_.flat_param().grad().defined()) drop();
    return;
  }
  std::vector<std::size_t> reset;
  for (std::size_t i = 0; i < has_.size(); ++i) {
    if (!(has_[i].unsharded || has_[i].sharded) || handle_.params()[i].grad().defined()) continue;
    reset.push_back(i);
    pieces_[i].reset();
    has_[i] = {};
  }
  free_unused();
  if (!sharded_.defined()) return;
  for (const std::size_t i : reset) handle_.sharded_view_of(sharded_, i).zero_();
}

void FlatParamGradient::adopt_visible() {
  drop_reset();
  const c10::NoGradGuard no_grad;
  if (!handle_.options().use_orig_params) {
    const at::Tensor& grad = handle_.flat_param().grad();
    const auto is_ours = [&](const at::Tensor& ours) { return ours.defined() && grad.is_alias_of(ours); };
    if (!grad.defined() || is_ours(unsharded_) || is_ours(sharded_)) return;
    drop();
    sharded_ = grad.detach().clone();
    for (HasGradient& has : has_) has.sharded = true;
    return;
  }
  for (std::size_t i = 0; i < has_.size(); ++i) {
    const at::Tensor& grad = handle_.params()[i].grad();
    const at::Tensor ours = visible(i);
    if (grad.defined() && !(ours.defined() && grad.is_alias_of(ours))) take_user_gradient(i, grad);
  }
  free_unused();
}

void FlatParamGradient::drop() {
  free_sharded();
  unsharded_.reset();
  pieces_.assign(pieces_.size(), {});
  has_.assign(has_.size(), {});
}

void FlatParamGradient::free_unused() {
  if (!has_unsharded()) unsharded_.reset();
  if (std::none_of(has_.begin(), has_.end(), [](HasGradient has) { return has.sharded; })) free_sharded();
}

// Frees the sharded gradient, or keeps its memory for the next one: that is written as soon as it is allocated, and the
// kernel would have to clear the pages.
void FlatParamGradient::free_sharded() {
  const bool is_ours = sharded_.defined() && sharded_.use_count() == 1 && sharded_.storage().use_count() == 1;
  if (keeps_pieces_ && is_ours) spare_ = std::move(sharded_);
  sharded_.reset();
}

// Takes a gradient that the user has assigned to a sharded parameter.
void FlatParamGradient::take_user_gradient(std::size_t param, const at::Tensor& grad) {
  const at::Tensor& flat_param = handle_.flat_param();
  const std::int64_t expected = handle_.sharded_views_[param].numel();
  if (grad.numel() != expected) {
    fail(ErrorCode::invalid_argument,
         "prepare gradients: the gradient assigned to sharded parameter '{}' has {} elements, expected this rank's {}",
         printable(handle_.layout().params()[param].fqn), grad.numel(), expected);
  }
  if (!sharded_.defined()) sharded_ = at::zeros_like(flat_param);
  const at::Tensor view = handle_.sharded_view_of(sharded_, param);
  view.copy_(grad.detach().reshape(view.sizes()));
  pieces_[param].reset();
  has_[param] = {.unsharded = false, .sharded = true};
}

bool FlatParamGradient::has_unsharded() const {
  return std::any_of(has_.begin(), has_.end(), [](HasGradient has) { return has.unsharded; });
}

void FlatParamGradient::take(std::size_t param) {
  at::Tensor& grad = handle_.params()[param].mutable_grad();
  if (!grad.defined()) return;
  if (grad.requires_grad()) {
    fail(ErrorCode::unsupported,
         "backward: the gradient of '{}' requires a gradient, expected backward without create_graph",
         printable(handle_.layout().params()[param].fqn));
  }
  const c10::NoGradGuard no_grad;
  has_[param].awaited = true;
  if (keeps_pieces_) return take_piece(param, std::exchange(grad, at::Tensor()));
  if (!unsharded_.defined()) {
    unsharded_ = empty_flat(handle_.layout().padded_unsharded_numel(), handle_.unsharded_->flat.options());
  }
  const at::Tensor view = handle_.view_of(unsharded_, param);
  if (has_[param].unsharded) {
    view.add_(grad);
  } else {
    view.copy_(grad);
  }
  has_[param].unsharded = true;
  grad.reset();
}

// Keeps the memory that backward has allocated, if elements are in the order of the flat parameter there.
void FlatParamGradient::take_piece(std::size_t param, const at::Tensor& grad) {
  at::Tensor& piece = pieces_[param];
  const at::IntArrayRef strides = handle_.layout().params()[param].strides;
  if (has_[param].unsharded) {
    piece.add_(grad);
  } else if (grad.layout() == at::kStrided && grad.strides() == strides) {
    piece = grad.detach();
  } else {
    piece = at::empty_strided(grad.sizes(), strides, grad.options()).copy_(grad);
  }
  has_[param].unsharded = true;
}

// Returns whether the gradients are to be averaged as they are. The same on all ranks.
bool FlatParamGradient::can_reduce_pieces() const {
  const at::ScalarType dtype = handle_.compute_dtype_;
  return keeps_pieces_ && !comm_hook_ && !fakes_reduce_ && !handle_.in_full_precision_ && reduce_dtype_ == dtype &&
         predivide_factor(averaged_ranks(), dtype) == 1;
}

void FlatParamGradient::start_reduce_pieces() {
  const FlatParamLayout& layout = handle_.layout();
  std::vector<comm::SharedMemory::Piece> pieces;
  std::size_t param = 0;
  std::int64_t all = 0;
  for (std::size_t part = 0; part < layout.is_padding().size(); ++part) {
    const std::int64_t numel = layout.numels_with_padding()[part];
    pieces.push_back({layout.is_padding()[part] ? at::Tensor() : pieces_[param++], numel});
    all += numel;
  }
  pieces.push_back({at::Tensor(), layout.padded_unsharded_numel() - all});
  is_averaged_ = !handle_.options().replicas;
  reduced_ = std::exchange(spare_, at::Tensor());
  if (!reduced_.defined() || reduced_.scalar_type() != handle_.compute_dtype_)
    reduced_ = empty_flat(layout.sharded_numel(), at::TensorOptions().dtype(handle_.compute_dtype_));
  prepare_sharded(reduced_);
  reduction_ = comm::SharedMemory::start_reduce_scatter(handle_.group(), reduced_, pieces,
                                                        is_averaged_ ? ReduceOp::average : ReduceOp::sum);
  inputs_ = {reduced_};
}

// Moves the gradients into unsharded_.
void FlatParamGradient::flatten_pieces() {
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const at::Tensor piece = std::exchange(pieces_[i], at::Tensor());
    if (!piece.defined()) continue;
    if (!unsharded_.defined())
      unsharded_ = empty_flat(handle_.layout().padded_unsharded_numel(), handle_.unsharded_->flat.options());
    handle_.view_of(unsharded_, i).copy_(piece);
  }
}

// Sets to 0 what no gradient was taken for: parameters and padding.
void FlatParamGradient::zero_missing_params() {
  const FlatParamLayout& layout = handle_.layout();
  if (!unsharded_.defined()) {
    unsharded_ = at::zeros({layout.padded_unsharded_numel()}, handle_.unsharded_->flat.options());
    return;
  }
  std::size_t param = 0;
  std::int64_t offset = 0;
  for (std::size_t part = 0; part < layout.is_padding().size(); ++part) {
    const std::int64_t numel = layout.numels_with_padding()[part];
    if (layout.is_padding()[part] || !has_[param].unsharded) unsharded_.narrow(0, offset, numel).zero_();
    if (!layout.is_padding()[part]) ++param;
    offset += numel;
  }
  unsharded_.narrow(0, offset, unsharded_.numel() - offset).zero_();
}

int FlatParamGradient::averaged_ranks() const {
  const std::optional<ProcessGroup>& replicas = handle_.options().replicas;
  return handle_.group().size() * (replicas ? replicas->size() : 1);
}

// Casts a sharded gradient that was kept in low precision, or allocates the one that `reduced` will be cast to.
void FlatParamGradient::prepare_sharded(const at::Tensor& reduced) {
  const at::Tensor& flat_param = handle_.flat_param();
  const at::ScalarType dtype = flat_param.scalar_type();
  if (sharded_.defined()) {
    sharded_ = sharded_.to(dtype);
  } else if (reduced.scalar_type() != dtype && reduced.device() == flat_param.device()) {
    fresh_ = empty_flat(reduced.numel(), reduced.options().dtype(dtype));
  }
}

void FlatParamGradient::start_reduce() {
  expect_no_reduction("start_reduce_gradient");
  const c10::NoGradGuard no_grad;
  is_averaged_ = false;
  if (can_reduce_pieces()) {
    start_reduce_pieces();
    pieces_.assign(pieces_.size(), {});
    for (HasGradient& has : has_) has.unsharded = false;
    return;
  }
  flatten_pieces();
  zero_missing_params();
  const at::ScalarType dtype = handle_.in_full_precision_ ? handle_.flat_param().scalar_type() : reduce_dtype_;
  const at::Tensor gradient = std::exchange(unsharded_, at::Tensor());
  for (HasGradient& has : has_) has.unsharded = false;
  // Allocated here, so that all of it belongs to the stream of the computation, which uses the result.
  const bool has_shard = is_sharded(handle_.options().strategy);
  at::Tensor reducing = gradient;
  if (dtype != gradient.scalar_type()) reducing = empty_flat(gradient.numel(), gradient.options().dtype(dtype));
  const at::Tensor reduced = has_shard ? empty_flat(handle_.layout().sharded_numel(), reducing.options()) : reducing;
  prepare_sharded(reduced);
  handle_.streams_->reduce.wait_for_current();
  const OnStream on(handle_.streams_->reduce);
  if (!reducing.is_same(gradient)) reducing.copy_(gradient);
  if (comm_hook_) {
    reduced_ = reduced;
    finish_reduce_ = comm_hook_(reducing, reduced_, handle_.group());
    inputs_ = {gradient, reducing};  // pending only if the hook did not throw
    return;
  }
  if (const int factor = predivide_factor(averaged_ranks(), dtype); factor != 1) reducing.div_(factor);
  if (fakes_reduce_) {
    reduced_ = has_shard ? reduced.copy_(handle_.shard_of(reducing)) : reduced;
  } else if (has_shard) {
    reduced_ = reduced;
    reduction_ = handle_.group().start_reduce_scatter_into(reduced_, reducing);
  } else {
    reduced_ = reduced;
    reduction_ = handle_.group().start_all_reduce(reduced_);
  }
  inputs_ = {gradient, reducing};
  if (!reduction_.completes_on_stream()) return;
  continue_reduce();
  if (reduction_.completes_on_stream()) complete();
}

void FlatParamGradient::continue_reduce() {
  const auto& replicas = handle_.options().replicas;
  if (!replicas || !reduced_.defined() || is_over_replicas_ || comm_hook_) return;
  const c10::NoGradGuard no_grad;
  reduction_.wait();  // on the reduce stream if it completes there
  reduction_ = replicas->start_all_reduce(reduced_);
  is_over_replicas_ = true;
}

// Waits for the reduction, and adds its result to sharded_.
void FlatParamGradient::complete() {
  continue_reduce();
  const bool is_over_replicas = std::exchange(is_over_replicas_, false);
  const OnStream on(is_over_replicas ? handle_.streams_->replicas : handle_.streams_->reduce);
  const at::Tensor reduced = std::exchange(reduced_, at::Tensor());
  if (comm_hook_) {
    if (const auto finish = std::exchange(finish_reduce_, nullptr)) finish();
  } else {
    reduction_.wait();
    const double ranks = averaged_ranks(), divided_before = predivide_factor(averaged_ranks(), reduced.scalar_type());
    if (!is_averaged_ && ranks != divided_before) reduced.div_(ranks / divided_before);
  }
  accumulate(reduced);
  completed_.set(handle_.streams_->device());
  inputs_.push_back(reduced);
}

void FlatParamGradient::accumulate(const at::Tensor& reduced) {
  const at::Tensor& flat_param = handle_.flat_param();
  const at::ScalarType dtype = flat_param.scalar_type();
  for (HasGradient& has : has_) has.sharded = std::exchange(has.awaited, false) || has.sharded;
  if (flat_param.device() != reduced.device()) {
    land();
    const at::Tensor grad = reduced.to(dtype);
    landing_ = at::empty(grad.sizes(), flat_param.options().requires_grad(false).pinned_memory(true));
    landing_.copy_(grad, /*non_blocking=*/true);
  } else if (sharded_.defined()) {
    sharded_.add_(reduced.to(dtype));
  } else {
    sharded_ = fresh_.defined() ? fresh_.copy_(reduced) : reduced;
  }
  fresh_.reset();
}

// Adds what was copied to CPU to sharded_.
void FlatParamGradient::land() {
  if (!landing_.defined()) return;
  completed_.synchronize();
  const at::Tensor landed = std::exchange(landing_, at::Tensor());
  sharded_ = sharded_.defined() ? sharded_.to(landed.scalar_type()).add_(landed) : landed;
}

void FlatParamGradient::finish_reduce() {
  if (inputs_.empty()) return;
  const c10::NoGradGuard no_grad;
  const std::vector<at::Tensor> inputs = std::exchange(inputs_, {});  // not pending if the following throws
  if (reduced_.defined()) complete();
  completed_.block_current();
  inputs_.clear();
}

void FlatParamGradient::prepare_for_optim() {
  const c10::NoGradGuard no_grad;
  land();
  free_unused();
  if (handle_.options().mixed_precision.keep_low_precision_grads && sharded_.defined()) {
    sharded_ = sharded_.to(handle_.compute_dtype_);
  }
  if (!handle_.options().use_orig_params) {
    handle_.flat_param().mutable_grad() = unsharded_.defined() ? unsharded_ : sharded_;
    return;
  }
  for (std::size_t i = 0; i < has_.size(); ++i) handle_.params()[i].mutable_grad() = visible(i);
}

void FlatParamGradient::unshard() {
  const c10::NoGradGuard no_grad;
  const FlatParamLayout& layout = handle_.layout();
  const FlatParamOptions& options = handle_.options();
  at::Tensor has = at::zeros({static_cast<std::int64_t>(has_.size())}, at::kInt);
  handle_.group().agree_on("unshard gradients", [&] {
    handle_.expect_unsharded("unshard_grad");
    for (std::size_t i = 0; i < has_.size(); ++i) {
      if (has_[i].unsharded) {
        fail(ErrorCode::invalid_argument, "the gradient of '{}' was not reduced, expected a backward without no_sync",
             printable(layout.params()[i].fqn));
      }
      if (sharded_.defined() && has_[i].sharded) has[static_cast<std::int64_t>(i)] = 1;
    }
  });
  const at::Tensor mine = has.clone();
  handle_.group().all_reduce(has, ReduceOp::max);
  if (has.max().item<int>() == 0) return;
  for (std::size_t i = 0; explains_itself() && i < has_.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    if (mine[index].item<int>() == has[index].item<int>()) continue;
    warn_once(fmt::format("unshard gradients: parameter '{}' has a gradient on other ranks only; on rank {} it is 0",
                          printable(layout.params()[i].fqn), handle_.group().world_rank()));
  }
  const at::ScalarType dtype =
      options.mixed_precision.keep_low_precision_grads ? handle_.compute_dtype_ : handle_.flat_param().scalar_type();
  const at::Tensor shard =
      sharded_.defined() ? sharded_.to(options.device, dtype)
                         : at::zeros({layout.sharded_numel()}, at::TensorOptions().dtype(dtype).device(options.device));
  at::Tensor unsharded = shard;
  if (is_sharded(options.strategy)) {
    unsharded = at::empty({layout.padded_unsharded_numel()}, shard.options());
    handle_.group().all_gather_into(unsharded, shard);
  }
  for (std::size_t i = 0; i < has_.size(); ++i) {
    if (has[static_cast<std::int64_t>(i)].item<int>() == 0) continue;
    handle_.params()[i].mutable_grad() = handle_.view_of(unsharded, i);
  }
}

void FlatParamGradient::write_back_unsharded() {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  for (std::size_t i = 0; i < has_.size(); ++i) {
    const at::Tensor& grad = handle_.params()[i].grad();
    has_[i].sharded = grad.defined();
    grads.push_back(grad.defined() ? grad : at::zeros_like(handle_.params()[i]));
  }
  if (std::none_of(has_.begin(), has_.end(), [](HasGradient has) { return has.sharded; })) return sharded_.reset();
  if (!sharded_.defined()) sharded_ = at::zeros_like(handle_.flat_param());
  sharded_.copy_(handle_.shard_of(handle_.flatten_tensors(grads)));
}

}  // namespace tessera::fsdp
